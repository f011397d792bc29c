"""Which checkpoint a run resumes from, and the way back from it into the shards."""

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer import OPTIMIZER_NAME

from ..config.urls import is_url
from ..errors import UserError
from ..runtime import Runtime
from .manifest import MANIFEST_FILE, check_given, checkpoints_in, find_faults, newest_good, run_in
from .remote import RemoteRun
from .run_folder import RunFolder
from .saver import Processes
from .state_dict import has_weights, read_optimizer, read_progress, read_scheduler, read_torch_optimizer, read_weights

logger = logging.getLogger(__name__)

# what a setting is called in an optimizer's groups
_IN_GROUPS = {
    "learning_rate": ("lr", "initial_lr"),
    "weight_decay": ("weight_decay",),
    "adam_beta1": ("betas",),
    "adam_beta2": ("betas",),
    "adam_epsilon": ("eps",),
}


class CheckpointLoader:
    """Finds a whole checkpoint, and loads it; never starts anew in silence.

    Args:
        runtime: Of the tensors.
        processes: All that train.
        shares_disk: Whether all processes see the same folder.
        remote: Where the run is kept, if that is a URL.
    """

    def __init__(
        self,
        runtime: Runtime,
        processes: Processes,
        *,
        shares_disk: bool,
        remote: RemoteRun | None,
    ) -> None:
        self._runtime, self._processes = runtime, processes
        self._shares_disk, self._remote = shares_disk, remote
        self._download: Path | None = None  # the copy of a checkpoint from a URL
        self.progress: dict[str, Any] | None = None  # of the checkpoint that training resumes from
        self.run: str | None = None  # that this is of; None for one of another trainer
        self.place: str | None = None  # where this is: a folder or URL
        self._changed_settings: frozenset[str] = frozenset()  # since then

    def find(
        self,
        asked: str | bool | None,
        run: RunFolder,
        layout: str,
        order: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> str | None:
        """Return the folder of the checkpoint that ``resume_from_checkpoint`` means, whose files are whole.

        Args:
            asked: ``resume_from_checkpoint``; True for the newest of the folder's run.
            run: The run's folder.
            layout: How batches are laid out, "packed" or "padded", which a resumed run must not change.
            order: What the pairs of each step depend on; a warning names what has changed.
            settings: How a step trains: those that have changed are named, and hold from here on.

        Raises:
            UserError: None is whole, or the one given by name is damaged or of other batches.
        """
        self.progress, self.run, self.place, self._changed_settings = None, None, None, frozenset()
        if asked is None or asked is False:
            return None
        if asked is True:
            local = self._remote is None
            found = checkpoints_in(run.path) if local else self._fetched()
            if run.began_without_a_checkpoint:
                logger.warning("The run in %s was stopped before its first checkpoint: it begins anew.", run.path)
                return None
            folder = newest_good(found, lambda each: self._examine(each, run))
            self.place = folder if self._remote is None else f"{self._remote.url}/{Path(folder).name}"
        else:
            self.place = os.fspath(asked)
            check_given(folder := self._local(self.place), self._examine)
        self.progress = read_progress(folder)
        with contextlib.suppress(OSError):
            self.run = run_in(Path(folder, MANIFEST_FILE).read_text(errors="replace"))
        if self.progress is not None and self.progress["batches"] != layout:
            raise UserError(
                f"The checkpoint {folder} was trained on {self.progress['batches']} batches, and these are "
                f"{layout}: the run would not go on to the bit. Resume with the `packing` it had, or "
                "start from its weights: give its folder as the model."
            )
        if self.progress is not None and (changed := _changed(self.progress["order"], order)):
            logger.warning("Resuming from %s, but the run will not be the one that it is of: %s.", folder, changed)
        if self.progress is not None and (before := self.progress.get("settings")):
            now = json.loads(json.dumps(settings, default=str))
            self._changed_settings = frozenset(name for name in now if name in before and before[name] != now[name])
            if changed := _changed(before, {name: now[name] for name in sorted(self._changed_settings)}):
                logger.warning("Resuming from %s with new settings, which hold from here on: %s.", folder, changed)
        return folder

    def load_weights(self, model: nn.Module, checkpoint: str) -> bool:
        """Load weights that our checkpoints hold; False, and none, where transformers has to."""
        if not has_weights(checkpoint):
            return False
        read_weights(model, checkpoint, self._runtime)
        return True

    def find_best(self, best: str) -> tuple[str, list[str]]:
        """Return the folder of the best checkpoint, which may be at the run's URL, and what is wrong with it."""
        try:
            if self._remote is not None:
                best = self._local(f"{self._remote.url}/{Path(best).name}")
            faults = find_faults(best, self._share)
        except Exception as error:  # file systems of fsspec say it in errors of many kinds
            faults = [str(error)]
        return best, [fault for said in self._processes.all_gather_object(faults) for fault in said]

    def load_optimizer(self, model: nn.Module, optimizer: Any, scheduler: Any, checkpoint: str) -> bool:
        """Load the optimizer's state and the schedule's place; False where transformers has to."""
        if self.progress is not None:
            keep = {name for setting in self._changed_settings for name in _IN_GROUPS.get(setting, ())}
            read_optimizer(optimizer, model, checkpoint, self.progress["optimizer"], self._runtime, keep)
            read_scheduler(scheduler, checkpoint, keeps_rate="lr" in keep)
            return True
        if not Path(checkpoint, OPTIMIZER_NAME).is_file():
            logger.warning(
                "The checkpoint %s has no state of the optimizer (was it saved with `save_only_model`?), so its "
                "moments and the learning rate's schedule begin anew.",
                checkpoint,
            )
        if self._runtime.compiles:
            read_torch_optimizer(optimizer, scheduler, checkpoint, self._runtime)
        return self._runtime.compiles

    def drop_download(self) -> None:
        """Remove the copy of a checkpoint that has been read."""
        if self._download is not None:
            shutil.rmtree(self._download, ignore_errors=True)

    def _examine(self, folder: Path, run: RunFolder | None = None) -> list[str]:
        """Return what is wrong with a checkpoint, in all processes: also, that it is not of this run."""
        is_foreign = run is not None and run.is_foreign(folder)
        faults = (
            ["it is of another run than the last in this folder"] if is_foreign else find_faults(folder, self._share)
        )
        return [fault for said in self._processes.all_gather_object(faults) for fault in said]

    @property
    def _share(self) -> tuple[int, int]:
        """Which part of a checkpoint's files this process looks at, and of how many."""
        return (self._processes.index, self._processes.count) if self._shares_disk else (0, 1)

    def _fetched(self) -> Iterator[Path]:
        """Yield the checkpoints at the run's URL, each downloaded when its turn comes."""
        assert self._remote is not None
        for name in self._remote.checkpoints():
            yield Path(self._local(f"{self._remote.url}/{name}"))

    def _local(self, checkpoint: str) -> str:
        """Return a folder of this host with the files of a checkpoint, which may be at a URL."""
        if not is_url(checkpoint):
            return checkpoint
        url, _, name = checkpoint.rstrip("/").rpartition("/")
        self.drop_download()
        self._download = Path(tempfile.mkdtemp(prefix="trl-tpu-"))
        return str(RemoteRun(url).get(name, self._download))


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changed = [name for name in now if before.get(name) != now[name]]
    return ", ".join(f"{name} was {before.get(name)} and is {now[name]}" for name in changed)
