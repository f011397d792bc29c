"""Save, find, verify and load checkpoints of a run.

A save has three steps:

1. Wait for the previous save, and create the staging folder.
2. While training waits, write the small files (config, tokenizer, progress, random states), and copy the tensors to
   the host. Each process copies the shards that its devices hold.
3. Alongside training, a thread writes the tensors and the manifest, renames the folder (or uploads it, the manifest
   last), and deletes older checkpoints.

A failed save is logged as an error and counted, and its files are deleted; training continues.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME

from ..errors import UserError
from ..modeling.layers import by_layer
from ..parallel.shard import mesh_of
from ..runtime import Runtime, Value
from . import folders, state_dict
from .folders import RunFolder, local_copy, newest_first
from .identity import LAYOUT, changes, optimizer_identity, saved_adapters

logger = logging.getLogger(__name__)


class Processes(Protocol):
    """The processes that save or load together."""

    index: int
    count: int
    is_first_of_host: bool

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all processes, by index."""


def on_all_ranks(action: Callable[[], Value], all_gather_object: Callable[[Any], list[Any]]) -> Value:
    """Call ``action`` on every rank and return this rank's result; raise on all ranks if any rank fails.

    Every Exception counts as a failure: libraries raise many types of errors when a disk is full.

    Raises:
        Exception: The error of this rank; an OSError if only other ranks failed.
    """
    try:
        result = action()
    except Exception as error:
        all_gather_object(f"{type(error).__name__}: {error}")
        raise
    if remote_errors := [error for error in all_gather_object(None) if error is not None]:
        raise OSError(f"in another process: {remote_errors[0]}")
    return result


# ---- saving


@dataclass(frozen=True)
class CheckpointContents:
    """The contents of a checkpoint.

    Args:
        name: Name of the checkpoint's folder, such as ``checkpoint-12``.
        run: The folder of the run.
        describe: Writes the small files to a given folder. All processes call it.
        model: The model to save; None if `describe` writes the weights.
        optimizer: The optimizer to save; None for a checkpoint of only the model.
        best: Name of the best checkpoint. It is never deleted. None if there is none.
    """

    name: str
    run: RunFolder
    describe: Callable[[Path], None]
    model: nn.Module | None
    optimizer: Optimizer | None
    best: str | None

    @property
    def place(self) -> str:
        """Folder or URL of the checkpoint."""
        return self.run.place_of(self.name)

    @property
    def staging(self) -> Path:
        """The staging folder of the checkpoint."""
        return folders.staging_of(self.run.path / self.name)


class Checkpointer:
    """Saves checkpoints of a run alongside its training.

    Args:
        runtime: The runtime of the model's tensors.
        processes: All training processes.
        writes: Whether this process writes the small files and the manifest. One process per disk does.
        shares_disk: Whether all processes write to one shared folder. If not, each host has a separate disk.
        limit: Maximum number of checkpoints to keep; None keeps all.

    Attributes:
        latest: Folder or URL of the checkpoint that was last begun.
        failed: Folders or URLs of checkpoints that could not be saved.
    """

    latest = ""
    _pending: Future[None] | None = None

    def __init__(
        self, runtime: Runtime, processes: Processes, *, writes: bool, shares_disk: bool, limit: int | None
    ) -> None:
        self._runtime, self._processes = runtime, processes
        self._writes, self._shares_disk, self._limit = writes, shares_disk, limit
        self.failed: list[str] = []

    @property
    def _has_tensors(self) -> bool:
        """True if this process has tensors to write."""
        return self._runtime.shards_model or self._writes

    def wait(self) -> None:
        """Wait until the save in progress has ended or failed."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def settle(self) -> None:
        """Wait for the save in progress, and share the list of failed saves. All ranks must call it."""
        self.wait()
        self.failed = list(dict.fromkeys(sum(self._processes.all_gather_object(self.failed), [])))

    def save(self, contents: CheckpointContents) -> None:
        """Copy the state to the host, and start writing it in a thread. All ranks must call it."""
        self.settle()
        self.latest, gather = contents.place, self._processes.all_gather_object
        try:
            on_all_ranks(lambda: self._make_staging(contents), gather)
            files, state = on_all_ranks(lambda: self._copy_to_host(contents), gather)
        except Exception as error:  # from a file system, a serializer or another host
            gather(None)  # raises if a process has died: that must end the run, not count as a failed save
            self._fail(contents, error)
            self._clean_up(contents)
            return
        if self._has_tensors:
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._pending = thread.submit(self._write, contents, files, state)
            thread.shutdown(wait=False)  # the thread ends after this save

    # ---- while training waits

    def _make_staging(self, contents: CheckpointContents) -> None:
        self._clean_up(contents)  # a killed save may have left files
        if self._makes_folder(contents):
            contents.staging.mkdir(parents=True)

    def _copy_to_host(self, contents: CheckpointContents) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the small files, and copy each tensor on this process's devices to the host once.

        Weights go to model files if one process has all of them, otherwise to the state folder. They go to both if
        model files cannot store every weight under its name.

        Returns:
            Weights for model files, and tensors for the state folder. Stacked tensors are split into one per layer.
        """
        self._runtime.step_boundary()
        contents.describe(contents.staging)
        model, optimizer, runtime = contents.model, contents.optimizer, self._runtime
        if model is None or not self._has_tensors:
            return {}, {}
        # if a user-defined `save_model` has written tensors already, keep them: they may differ from the model's
        to_files = runtime.topology().process_count == 1 and not state_dict.tensors_in(contents.staging)
        to_state = optimizer is not None and not (to_files and state_dict.are_in_model_files(model))
        tensors = {} if optimizer is None else state_dict.optimizer_tensors(optimizer, model)
        state = by_layer(model, runtime.local_shards(tensors))
        weights = state_dict.trained_weights(model) if to_files or to_state else {}
        shards = by_layer(model, runtime.local_shards(weights))
        if to_state:
            unique = state_dict.unique_tensors(shards)
            state |= {f"{state_dict.WEIGHT_PREFIX}{name}": shard for name, shard in unique.items()}
        return shards if to_files else {}, state

    # ---- alongside training, in a thread; all hosts call these methods together

    def _write(self, contents: CheckpointContents, files: dict[str, Any], state: dict[str, Any]) -> None:
        staging, remote = contents.staging, contents.run.remote
        try:
            self._on_all_hosts(lambda: self._write_tensors(contents, files, state))
            described = self._describe_files(contents)
            if remote is not None:
                # shards of an older checkpoint from another mesh would be read along with the new ones
                self._on_all_hosts(lambda: remote.delete(contents.name), by_writer=True)
                self._on_all_hosts(lambda: remote.put(staging, folders.files_in(staging), contents.name))
            # the manifest comes last, and every host waits until the checkpoint is complete
            self._on_all_hosts(lambda: self._publish(contents, described), by_writer=True)
        except Exception as error:
            self._fail(contents, error)
        finally:
            self._clean_up(contents)

    def _write_tensors(self, contents: CheckpointContents, files: dict[str, Any], state: dict[str, Any]) -> None:
        if files:
            state_dict.write_model(contents.model, state_dict.join_shards(files), contents.staging)
        if state:
            state_dict.write_state(state, contents.staging / state_dict.STATE_FOLDER, self._runtime)

    def _describe_files(self, contents: CheckpointContents) -> folders.Files:
        """Return sizes and checksums of the files of all hosts, or only of this host if each has a separate disk."""
        names = folders.files_in(contents.staging)  # every host has written its files
        if self._shares_disk:
            topology = self._runtime.topology()
            names = names[topology.process_index :: topology.process_count]
        described: folders.Files = self._on_all_hosts(lambda: folders.describe_files(contents.staging, names))
        if not self._shares_disk and contents.run.remote is None:
            return described
        return {name: file for part in self._gather(described) for name, file in part.items()}

    def _publish(self, contents: CheckpointContents, files: folders.Files) -> None:
        """Make the checkpoint visible, then delete older ones."""
        run, staging = contents.run, contents.staging
        if run.remote is None:
            folders.publish(staging, run.path / contents.name, files)
        else:
            folders.seal(staging, files)
            run.remote.put(staging, [folders.MANIFEST_FILE], contents.name)
        run.rotate(self._limit, {contents.name, contents.best or contents.name})

    def _gather(self, value: Any) -> list[Any]:
        """All-gather a value among the saving threads of all hosts."""
        return self._runtime.all_gather_object(value, while_saving=True)

    def _on_all_hosts(self, action: Callable[[], Any], by_writer: bool = False) -> Any:
        """Call ``action`` in all hosts' saving threads, or only in the writer's; raise in all threads if one fails."""
        return on_all_ranks(action if self._writes or not by_writer else lambda: None, self._gather)

    # ---- both

    def _fail(self, contents: CheckpointContents, error: Exception) -> None:
        """Count and log a failed save."""
        self.failed.append(contents.place)
        fault = f"{contents.place} was NOT saved ({type(error).__name__}: {error})"
        advice = "Training continues, and earlier checkpoints stay. Free disk space or repair the folder."
        logger.error("%s. %s", fault, advice, exc_info=error)

    def _makes_folder(self, contents: CheckpointContents) -> bool:
        """Return whether this process creates a staging folder.

        The writer does. If the run is at a URL, each process with tensors does, and uploads its files from there.
        """
        return self._writes or (self._has_tensors and contents.run.remote is not None)

    def _clean_up(self, contents: CheckpointContents) -> None:
        if self._makes_folder(contents):
            folders.discard(contents.staging)


# ---- loading


class CheckpointLoader:
    """Finds a good checkpoint and loads it; never starts from scratch silently.

    Args:
        runtime: The runtime of the model's tensors.
        processes: All training processes.
        shares_disk: Whether all processes see the same folder.

    Attributes:
        progress: Content of the checkpoint's progress file; None for a checkpoint of another trainer.
        folder: The checkpoint's folder on this host.
        place: The checkpoint's folder or URL as requested.
        download: Owns the local copy of a checkpoint at a URL. Close it when the checkpoint has been read.
    """

    progress: dict[str, Any] | None = None
    folder: str | None = None
    place: str | None = None
    _must_be_same = False  # "auto" was asked for

    def __init__(self, runtime: Runtime, processes: Processes, *, shares_disk: bool) -> None:
        self._runtime, self._processes, self._shares_disk = runtime, processes, shares_disk
        self.download = ExitStack()

    def find(self, asked: str | bool | None, run: RunFolder, layout: str, identity: Mapping[str, Any]) -> str | None:
        """Find and verify the checkpoint to resume from, and return its local folder; None to start from scratch.

        Args:
            asked: ``resume_from_checkpoint``: a folder or URL; True for the newest good checkpoint of the run; "auto"
                for its newest checkpoint if it has any; None or False to start from scratch.
            run: The run's folder.
            layout: The layout of batches, "packed" or "padded". A resumed run must not change it.
            identity: The result of `identity_of`. If parts changed, the new values apply and a warning lists the
                changes; with "auto", changes raise an error.

        Raises:
            UserError: No checkpoint is good; the requested checkpoint, or with "auto" the newest, is damaged or was
                trained with another layout, other attributes, other adapters or another base model; with "auto", the
                newest belongs to another run.
        """
        self.progress = self.folder = self.place = None
        self._must_be_same = asked == "auto"
        if asked is None or asked is False:
            return None
        if self._must_be_same:
            # gather names: if only some processes see a checkpoint, it is damaged, and none may start from scratch
            names = newest_first(set[str]().union(*self._processes.all_gather_object(run.checkpoints())))
            if not names and not run.began_from:
                return None
            asked = run.place_of(names[0]) if names else True  # True makes `_newest_good` report the missing ones
        if asked is True and run.began_without_a_checkpoint:
            logger.warning("The run in %s has saved no checkpoint yet: it starts from scratch.", run.path)
            return None
        if isinstance(asked, bool):
            self.folder = folder = self._newest_good(run)
            self.place = run.place_of(Path(folder).name)
        else:
            self.place = os.fspath(asked)
            self.folder = folder = self._local(self.place)
            if folders.has_own_format(folder) and (faults := self._faults(folder)):
                raise UserError(
                    f"The checkpoint {folder} is damaged: {'; '.join(faults)}. "
                    "Pass another folder, or resume_from_checkpoint=True for the newest good checkpoint."
                )
        if (path := Path(folder, state_dict.PROGRESS_FILE)).is_file():
            self.progress = json.loads(path.read_text(encoding="utf-8"))
        elif self._must_be_same:
            raise UserError(
                f"resume_from_checkpoint='auto': the newest checkpoint, {folder}, has no {path.name}, and its run "
                "cannot be identified. Set resume_from_checkpoint to its folder, or set another output_dir."
            )
        recorded = {**self.progress["order"], LAYOUT: self.progress["batches"]} if self.progress else {}
        self._check_identity(recorded | saved_adapters(folder, identity), {**identity, LAYOUT: layout})
        return folder

    def _check_identity(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Report differences between the checkpoint's run and the current one, see `find`."""
        if not (differences := changes(before, now)):
            return
        listing = "; ".join(map(str, differences))
        if any(change.breaks for change in differences):
            raise UserError(
                f"The checkpoint {self.folder} cannot be resumed by this run: {listing}. Restore the old values, or "
                "start from its weights: pass its folder as the model."
            )
        if self._must_be_same:
            raise UserError(
                f"resume_from_checkpoint='auto': the newest checkpoint, {self.folder}, belongs to another run: "
                f"{listing}. Restore the old values, or set another output_dir. To resume with the new values, set "
                "resume_from_checkpoint=True."
            )
        logger.warning("Resuming from %s with other settings; results will differ: %s.", self.folder, listing)

    def state(self) -> TrainerState:
        """Return transformers' `TrainerState` from the checkpoint; an empty one if nothing is resumed."""
        if self.folder is None:
            return TrainerState()
        return TrainerState.load_from_json(str(Path(self.folder, TRAINER_STATE_NAME)))

    def best_so_far(self, run: RunFolder) -> str | None:
        """Return the current path of the resumed run's best checkpoint; None if the run has none.

        The path is next to the resumed checkpoint, in the run's folder (or at its URL), or where it was saved.
        """
        recorded = self.state().best_model_checkpoint
        if self.folder is None or recorded is None:
            return None
        name = Path(recorded).name
        places = [Path(self.folder).with_name(name), run.path / name, Path(recorded)]
        return str(next((place for place in places if place.is_dir()), run.path / name))

    def find_best(self, best: str, run: RunFolder) -> tuple[str, list[str]]:
        """Return the local folder of the best checkpoint (downloaded if the run is at a URL), and its faults."""
        try:
            if run.remote is not None:
                best = self._local(run.place_of(Path(best).name))
            return best, self._faults(best)
        except Exception as error:  # fsspec file systems raise many types of errors
            return best, [str(error)]

    def load_weights(self, model: nn.Module, checkpoint: str) -> bool:
        """Load weights from a checkpoint of this package, or into a sharded model; return whether it did.

        If not, transformers has to load them. It cannot load shards.
        """
        own_files = Path(checkpoint, state_dict.STATE_FOLDER), Path(checkpoint, state_dict.PROGRESS_FILE)
        reads = mesh_of(model) is not None or any(path.exists() for path in own_files)
        if reads:
            state_dict.read_weights(model, checkpoint, self._runtime)
        return reads

    def load_optimizer(self, model: nn.Module, optimizer: Any, scheduler: Any, checkpoint: str) -> bool:
        """Load the states of the optimizer and scheduler; return False if transformers has to load them."""
        if self.progress is not None:
            recorded, now = self.progress["optimizer"], optimizer_identity(optimizer.param_groups)
            state_dict.read_optimizer(optimizer, model, checkpoint, recorded, self._runtime)
            self._check_identity(optimizer_identity(recorded["groups"]), now)
            state_dict.read_scheduler(scheduler, checkpoint)
            return True
        if not Path(checkpoint, OPTIMIZER_NAME).is_file():
            logger.warning(
                f"The checkpoint {checkpoint} has no optimizer state (was it saved with `save_only_model`?), so the "
                "optimizer's moments and the learning rate schedule start from scratch."
            )
        elif self._runtime.is_spmd:
            state_dict.read_torch_optimizer(optimizer, scheduler, checkpoint, self._runtime)
            return True
        return False

    def _newest_good(self, run: RunFolder) -> str:
        """Return the folder of the newest good checkpoint, and warn about each newer, damaged one."""
        rejected = []
        for name in run.checkpoints():
            if not (faults := self._faults(folder := self._local(run.place_of(name)))):
                return folder
            rejected.append(f"{folder}: {'; '.join(faults)}")
            logger.warning("Skipping the checkpoint %s", rejected[-1])
        raise UserError(
            f"resume_from_checkpoint: output_dir has no good checkpoint. Found: {' / '.join(rejected) or 'none'}. "
            "Pass the folder of a checkpoint, or leave resume_from_checkpoint out to start from scratch."
        )

    def _faults(self, folder: str) -> list[str]:
        """Return a checkpoint's faults. Processes that share a disk check one part of its files each."""
        share = (self._processes.index, self._processes.count) if self._shares_disk else (0, 1)
        return sum(self._processes.all_gather_object(folders.find_faults(folder, share)), [])

    def _local(self, checkpoint: str) -> str:
        """Return a local folder with a checkpoint's files, downloaded if the checkpoint is at a URL.

        The first rank of each host downloads the files for all ranks of its host. These ranks are consecutive.
        """
        self.download.close()
        gather, leads = self._processes.all_gather_object, self._processes.is_first_of_host
        copy = local_copy(checkpoint) if leads else nullcontext()
        folders = gather(on_all_ranks(lambda: self.download.enter_context(copy), gather))
        return str([folder for folder in folders[: self._processes.index + 1] if folder is not None][-1])
