"""Which checkpoint a run resumes from, and the way back from it into the shards."""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer import OPTIMIZER_NAME

from ..errors import UserError
from ..runtime import Runtime
from .manifest import check_given, checkpoints_in, find_faults, newest_good
from .remote import RemoteRun, is_url, staging_folder
from .saver import Processes
from .state_dict import has_weights, read_optimizer, read_progress, read_scheduler, read_torch_optimizer, read_weights

logger = logging.getLogger(__name__)


class CheckpointLoader:
    """Finds a whole checkpoint, and loads it; never starts anew in silence.

    Args:
        runtime: Of the tensors.
        processes: All that train.
        output_dir: The run's folder.
        shares_disk: Whether all processes see the same folder.
        remote: Where the run is kept, if that is a URL.
    """

    def __init__(
        self,
        runtime: Runtime,
        processes: Processes,
        output_dir: str,
        *,
        shares_disk: bool,
        remote: RemoteRun | None,
    ) -> None:
        self._runtime, self._processes, self._output_dir = runtime, processes, output_dir
        self._shares_disk, self._remote = shares_disk, remote
        self._download: Path | None = None  # the copy of a checkpoint from a URL
        self.progress: dict[str, Any] | None = None  # of the checkpoint that training resumes from

    def find(self, asked: str | bool | None, layout: str, order: Mapping[str, Any]) -> str | None:
        """Return the folder of the checkpoint that ``resume_from_checkpoint`` means, whose files are whole.

        Args:
            asked: ``resume_from_checkpoint``.
            layout: How batches are laid out, "packed" or "padded", which a resumed run must not change.
            order: What the pairs of each step depend on; a warning names what has changed.

        Raises:
            UserError: None is whole, or the one given by name is damaged or of other batches.
        """
        self.progress = None
        if asked is None or asked is False:
            return None
        if asked is True:
            local = self._remote is None
            folder = newest_good(checkpoints_in(self._output_dir) if local else self._fetched(), self._examine)
        else:
            check_given(folder := self._local(os.fspath(asked)), self._examine)
        self.progress = read_progress(folder)
        if self.progress is not None and self.progress["batches"] != layout:
            raise UserError(
                f"The checkpoint {folder} was trained on {self.progress['batches']} batches, and these are "
                f"{layout}: the run would not go on to the bit. Resume with the `packing` it had, or "
                "start from its weights: give its folder as the model."
            )
        if self.progress is not None and (changed := _changed(self.progress["order"], order)):
            logger.warning("Resuming from %s, but the run will not be the one that it is of: %s.", folder, changed)
        return folder

    def load_weights(self, model: nn.Module, checkpoint: str) -> bool:
        """Load weights that our checkpoints hold; False, and none, where transformers has to."""
        if not has_weights(checkpoint):
            return False
        read_weights(model, checkpoint, self._runtime)
        return True

    def load_best(self, model: nn.Module, best: str) -> bool:
        """Load the weights of the best checkpoint, which may be at the run's URL; False as in `load_weights`."""
        if self._remote is not None:
            best = self._local(f"{self._remote.url}/{Path(best).name}")
        return self.load_weights(model, best)

    def load_optimizer(self, model: nn.Module, optimizer: Any, scheduler: Any, checkpoint: str) -> bool:
        """Load the optimizer's state and the schedule's place; False where transformers has to."""
        if self.progress is not None:
            read_optimizer(optimizer, model, checkpoint, self.progress["optimizer"], self._runtime)
            read_scheduler(scheduler, checkpoint)
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

    def _examine(self, folder: Path) -> list[str]:
        share = (self._processes.index, self._processes.count) if self._shares_disk else (0, 1)
        return [fault for said in self._processes.all_gather_object(find_faults(folder, share)) for fault in said]

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
        self._download = Path(staging_folder(url), f"downloaded-{self._processes.index}", name)
        self.drop_download()  # of an earlier run
        return str(RemoteRun(url).get(name, self._download.parent))


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changed = [name for name in now if before.get(name) != now[name]]
    return ", ".join(f"{name} was {before.get(name)} and is {now[name]}" for name in changed)
