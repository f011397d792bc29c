"""Save, find, verify and load checkpoints of a run.

A save has three steps:

1. Wait for the save before it, and make the staging folder.
2. While training waits, write the small files (config, tokenizer, numbers, random states), and copy the tensors to
   the host. Each process copies those that its devices hold.
3. Alongside training, a thread writes the tensors, seals the folder with a manifest, renames it (or uploads it, the
   manifest last), and deletes older checkpoints.

A save that fails is loud and counted, and leaves nothing behind; training goes on.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME

from ..errors import UserError
from ..modeling.layers import by_layer
from ..parallel.shard import mesh_of
from ..runtime import Runtime
from . import folders, state_dict
from .folders import RunFolder, local_copy, newest_first

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Processes(Protocol):
    """The processes that save or load together."""

    index: int
    count: int
    is_first_of_host: bool

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all processes."""


def on_all_ranks(action: Callable[[], T], all_gather_object: Callable[[Any], list[Any]]) -> T:
    """Call ``action`` in every process and return its result; raise in all if it raised in any one.

    Libraries report a full disk by errors of many kinds.

    Raises:
        Exception: The error of this process; an OSError if only another process failed.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    errors = all_gather_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if others := [error for error in errors if error is not None]:
        raise OSError(f"in another process: {others[0]}")
    return result


# ---- saving


@dataclass(frozen=True)
class CheckpointContents:
    """The contents of a checkpoint.

    Args:
        name: Name of its folder, ``checkpoint-12``.
        run: The run that it belongs to.
        describe: Writes the small files to a folder. All processes call it.
        model: The model whose weights are saved; None if `describe` has written them.
        optimizer: The optimizer whose state is saved; None for a checkpoint of the model alone.
        best: The name of the checkpoint that must not be deleted.
    """

    name: str
    run: RunFolder
    describe: Callable[[Path], None]
    model: nn.Module | None
    optimizer: Optimizer | None
    best: str | None

    @property
    def place(self) -> str:
        """Its folder, or URL."""
        return self.run.place_of(self.name)

    @property
    def staging(self) -> Path:
        """The folder in which it is written."""
        return folders.staging_of(self.run.path / self.name)


class Checkpointer:
    """Saves checkpoints of a run alongside its training.

    Args:
        runtime: The runtime of the tensors.
        processes: All processes that train.
        writes: Whether this process writes the small files, and publishes: one of those that share a disk.
        shares_disk: Whether all processes write to one folder, rather than each to a disk of its own.
        limit: How many checkpoints are kept; None for all.
    """

    def __init__(
        self, runtime: Runtime, processes: Processes, *, writes: bool, shares_disk: bool, limit: int | None
    ) -> None:
        self._runtime, self._processes = runtime, processes
        self._writes, self._shares_disk, self._limit = writes, shares_disk, limit
        self.latest = ""
        """The folder, or URL, of the last save that was begun."""
        self.failed: list[str] = []
        """The folders, or URLs, of checkpoints that could not be saved."""
        self._pending: Future[None] | None = None

    @property
    def _has_tensors(self) -> bool:
        """Whether this process has tensors to write."""
        return self._runtime.shards_model or self._writes

    def wait(self) -> None:
        """Wait until the save in progress has ended or failed."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def settle(self) -> None:
        """Wait for the save in progress, and tell every rank which saves failed. All ranks take part."""
        self.wait()
        self.failed = list(dict.fromkeys(sum(self._processes.all_gather_object(self.failed), [])))

    def save(self, contents: CheckpointContents) -> None:
        """Copy the state, and write it as a checkpoint alongside training. All processes take part."""
        self.settle()
        self.latest, gather = contents.place, self._processes.all_gather_object
        try:
            on_all_ranks(lambda: self._make_room(contents), gather)
            files, state = on_all_ranks(lambda: self._take(contents), gather)
        except Exception as error:  # of a file system, a serializer or another host
            gather(None)  # a process that is gone is no failed save: it ends the run here
            self._fail(contents, error)
            self._clean_up(contents)
            return
        if self._has_tensors:
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._pending = thread.submit(self._write, contents, files, state)
            thread.shutdown(wait=False)  # the thread ends after this save

    def keep_best_alone(self, run: RunFolder, best: str) -> None:
        """Delete the last checkpoint at the end of training, where one may stay and the best is another."""
        if self._limit == 1 and self._writes:
            run.rotate(1, {best})

    # ---- while training waits

    def _make_room(self, contents: CheckpointContents) -> None:
        self._clean_up(contents)  # after a save that was killed
        if self._makes_folder(contents):
            contents.staging.mkdir(parents=True)

    def _take(self, contents: CheckpointContents) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the small files, and copy the tensors that this process's devices hold to the host, each once.

        Weights go into model files if one process has all of them, else into the state. They go into both if model
        files do not have every weight under its own name.

        Returns:
            Weights for model files, and the state. Tensors of stacked layers are named after each layer.
        """
        self._runtime.step_boundary()
        contents.describe(contents.staging)
        model, optimizer, runtime = contents.model, contents.optimizer, self._runtime
        if model is None or not self._has_tensors:
            return {}, {}
        # a user's `save_model` may have written more than the model, or other weights
        to_files = runtime.topology().process_count == 1 and not state_dict.tensors_in(contents.staging)
        to_state = optimizer is not None and not (to_files and state_dict.are_in_model_files(model))
        tensors = {} if optimizer is None else state_dict.optimizer_tensors(optimizer, model)
        if to_files or to_state:
            weights = state_dict.trained_weights(model)
            tensors |= {f"{state_dict.WEIGHT_PREFIX}{name}": tensor for name, tensor in weights.items()}
        shards = by_layer(model, runtime.local_shards(tensors))
        state = {name: shard for name, shard in shards.items() if name.startswith(state_dict.OPTIMIZER_PREFIX)}
        weights = {name: shard for name, shard in shards.items() if name not in state}
        if to_state:
            state |= state_dict.once(weights)
        return {name.removeprefix(state_dict.WEIGHT_PREFIX): weights[name] for name in weights if to_files}, state

    # ---- alongside training, on a thread; if there are several hosts, all take part

    def _write(self, contents: CheckpointContents, files: dict[str, Any], state: dict[str, Any]) -> None:
        staging, remote = contents.staging, contents.run.remote
        try:
            self._together(lambda: self._write_tensors(contents, files, state))
            described = self._describe_files(contents)
            if remote is not None:
                # files of a run on another mesh would be read with these
                self._together(lambda: remote.delete(contents.name), by_writer=True)
                self._together(lambda: remote.put(staging, folders.files_in(staging), contents.name))
            # the manifest comes last, and no host goes on before the checkpoint is there
            self._together(lambda: self._publish(contents, described), by_writer=True)
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
        """Return sizes and checksums of all hosts' files; of this host's if each seals its own disk."""
        names = folders.files_in(contents.staging)  # every host has written its files
        if self._shares_disk:
            topology = self._runtime.topology()
            names = names[topology.process_index :: topology.process_count]
        described: folders.Files = self._together(lambda: folders.describe_files(contents.staging, names))
        if not self._shares_disk and contents.run.remote is None:
            return described
        return {name: file for part in self._gather(described) for name, file in part.items()}

    def _publish(self, contents: CheckpointContents, files: folders.Files) -> None:
        """Make the checkpoint visible, and only then delete older ones."""
        run, staging = contents.run, contents.staging
        if run.remote is None:
            folders.publish(staging, run.path / contents.name, files)
        else:
            folders.seal(staging, files)
            run.remote.put(staging, [folders.MANIFEST_FILE], contents.name)
        run.rotate(self._limit, {contents.name, contents.best or contents.name})

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all hosts' saving threads."""
        return self._runtime.all_gather_object(value, while_saving=True)

    def _together(self, action: Callable[[], Any], by_writer: bool = False) -> Any:
        """Act on the saving threads of all hosts, or on the writer's alone; raise on all what any one raised."""
        return on_all_ranks(action if self._writes or not by_writer else lambda: None, self._gather)

    # ---- both

    def _fail(self, contents: CheckpointContents, error: Exception) -> None:
        """Count a save that has failed."""
        self.failed.append(contents.place)
        fault = f"{contents.place} was NOT saved ({type(error).__name__}: {error})"
        advice = "Training goes on, and earlier checkpoints stay; make room or mend the folder."
        logger.error("%s. %s", fault, advice, exc_info=error)

    def _makes_folder(self, contents: CheckpointContents) -> bool:
        """Return whether this process makes the folder: one of those that share a disk; each if it is private."""
        return self._writes or (self._has_tensors and contents.run.remote is not None)

    def _clean_up(self, contents: CheckpointContents) -> None:
        if self._makes_folder(contents):  # also when the disk is full
            folders.discard(contents.staging)


# ---- loading


class CheckpointLoader:
    """Finds a whole checkpoint and loads it; never starts anew silently.

    Args:
        runtime: The runtime of the tensors.
        processes: All processes that train.
        shares_disk: Whether all processes see the same folder.
    """

    def __init__(self, runtime: Runtime, processes: Processes, *, shares_disk: bool) -> None:
        self._runtime, self._processes, self._shares_disk = runtime, processes, shares_disk
        self._download = ExitStack()  # has the copy of a checkpoint from a URL
        self.progress: dict[str, Any] | None = None
        """The numbers that training resumes from; None for a checkpoint of another trainer."""
        self.folder: str | None = None
        """The checkpoint's folder on this host."""
        self.place: str | None = None
        """The folder or URL by which the checkpoint was asked for."""

    def find(self, asked: str | bool | None, run: RunFolder, layout: str, order: Mapping[str, Any]) -> str | None:
        """Return the folder of the checkpoint that ``resume_from_checkpoint`` means, whose files are whole.

        Args:
            asked: ``resume_from_checkpoint``; True for the newest good one of the run's folder; "auto" for the newest,
                if there is one.
            run: The run's folder.
            layout: The layout of batches, "packed" or "padded", which a resumed run must not change.
            order: Settings that each step depends on. A warning names those that changed, and the new values hold;
                with "auto" they are an error.

        Raises:
            UserError: None is whole; or the one given by name, or the newest of "auto", is damaged or was trained on
                other batches; or the newest of "auto" belongs to another run.
        """
        self.progress = self.folder = self.place = None
        if asked is None or asked is False:
            return None
        if is_auto := asked == "auto":
            # a checkpoint that only some processes see is damaged, and no reason for the others to start fresh
            names = newest_first({*chain(*self._processes.all_gather_object(run.checkpoints()))})
            if not names and not run.began_from:
                return None
            asked = run.place_of(names[0]) if names else True  # which names what is lost
        if asked is True and run.began_without_a_checkpoint:
            logger.warning("The run in %s has saved no checkpoint yet: it begins anew.", run.path)
            return None
        if isinstance(asked, bool):
            folder = self._newest_good(run)
            self.place = run.place_of(Path(folder).name)
        else:
            self.place = os.fspath(asked)
            self._check_given(folder := self._local(self.place))
        self.folder = folder
        if not (path := Path(folder, state_dict.PROGRESS_FILE)).is_file():
            if is_auto:
                raise UserError(
                    f"resume_from_checkpoint='auto': the newest checkpoint, {folder}, has no {path.name}, which says "
                    "whose it is. Name it as resume_from_checkpoint, or give another output_dir."
                )
            return folder
        self.progress = progress = json.loads(path.read_text(encoding="utf-8"))
        if (before := progress["batches"]) != layout:
            raise UserError(
                f"The checkpoint {folder} was trained on {before} batches, and these are {layout}, so the run would "
                "not resume to the bit. Resume with the `packing` it had, or start from its weights: give its folder "
                "as the model."
            )
        then, now = progress["order"], json.loads(json.dumps(order))
        if now.get("attributes") != then.get("attributes", now.get("attributes")):
            raise UserError(
                f"The checkpoint {folder} has outputs for attributes={then['attributes']}, and this run for "
                f"attributes={now['attributes']}. Resume with the attributes that it had, in that order."
            )
        changed = [name for name in now if name in then and then[name] != now[name]]
        if listing := ", ".join(f"{name} was {then[name]} and is {now[name]}" for name in changed):
            if is_auto:
                raise UserError(
                    f"resume_from_checkpoint='auto': the newest checkpoint, {folder}, belongs to another run: "
                    f"{listing}. Restore the old values, or give another output_dir. To resume with the new values, "
                    "set resume_from_checkpoint=True."
                )
            logger.warning("Resuming from %s with different settings; results will differ: %s.", folder, listing)
        return folder

    def state(self) -> TrainerState:
        """Return transformers' state of the run that is resumed; an empty one if none is."""
        if self.folder is None:
            return TrainerState()
        return TrainerState.load_from_json(str(Path(self.folder, TRAINER_STATE_NAME)))

    def best_so_far(self, run: RunFolder) -> str | None:
        """Return where the best checkpoint of the run that is resumed is now; None if there is none.

        It is next to the checkpoint that is resumed, in the run's folder (or at its URL), or where it was saved.
        """
        recorded = self.state().best_model_checkpoint
        if self.folder is None or recorded is None:
            return None
        name = Path(recorded).name
        places = [Path(self.folder).with_name(name), run.path / name, Path(recorded)]
        best = next((place for place in places if place.is_dir()), run.path / name)
        if run.remote is None and not best.is_dir():
            logger.warning("The best checkpoint so far, %s, is not there any more.", best)
        return str(best)

    def find_best(self, best: str, run: RunFolder) -> tuple[str, list[str]]:
        """Return the folder of the best checkpoint, which may be at the run's URL, and its faults."""
        try:
            if run.remote is not None:
                best = self._local(run.place_of(Path(best).name))
            return best, self._faults(best)
        except Exception as error:  # file systems of fsspec raise errors of many kinds
            return best, [str(error)]

    def load_weights(self, model: nn.Module, checkpoint: str) -> bool:
        """Load weights from our checkpoints; False, and load none, if transformers has to: it loads no shards."""
        has_state = Path(checkpoint, state_dict.STATE_FOLDER).is_dir()
        is_ours = has_state or Path(checkpoint, state_dict.PROGRESS_FILE).is_file() or mesh_of(model) is not None
        if is_ours:
            state_dict.read_weights(model, checkpoint, self._runtime)
        return is_ours

    def load_optimizer(self, model: nn.Module, optimizer: Any, scheduler: Any, checkpoint: str) -> bool:
        """Load the states of the optimizer and of the schedule; False if transformers has to."""
        if self.progress is not None:
            state_dict.read_optimizer(optimizer, model, checkpoint, self.progress["optimizer"], self._runtime)
            state_dict.read_scheduler(scheduler, checkpoint)
            return True
        if not Path(checkpoint, OPTIMIZER_NAME).is_file():
            logger.warning(
                "The checkpoint %s has no state of the optimizer (was it saved with `save_only_model`?), so its "
                "moments and the learning rate's schedule begin anew.",
                checkpoint,
            )
        elif self._runtime.is_spmd:
            state_dict.read_torch_optimizer(optimizer, scheduler, checkpoint, self._runtime)
            return True
        elif mesh_of(model) is not None:
            raise UserError(
                f"The checkpoint {checkpoint} is another trainer's, whose optimizer state is unsharded, and here it "
                "is sharded. Resume it in one process without a mesh first, and go on from what that saves."
            )
        return False

    def drop_download(self) -> None:
        """Remove the copy of a checkpoint that has been read."""
        self._download.close()

    def _newest_good(self, run: RunFolder) -> str:
        """Return the folder of the newest whole checkpoint; warnings name the damaged ones after it."""
        rejected = []
        for name in run.checkpoints():
            if not (faults := self._faults(folder := self._local(run.place_of(name)))):
                return folder
            rejected.append(f"{folder}: {'; '.join(faults)}")
            logger.warning("Skipping the checkpoint %s", rejected[-1])
        listing = "".join(f"\n  {line}" for line in rejected) or " no folder checkpoint-N at all"
        raise UserError(
            f"resume_from_checkpoint: output_dir has no good checkpoint. Found:{listing}\n"
            "Give the folder of a checkpoint, or leave resume_from_checkpoint out to start anew."
        )

    def _check_given(self, folder: str) -> None:
        """Reject a damaged checkpoint that was named. One of another trainer has no manifest and may pass."""
        if folders.is_ours(folder):
            if faults := self._faults(folder):
                raise UserError(
                    f"The checkpoint {folder} is damaged: {'; '.join(faults)}. "
                    "Give another folder, or resume_from_checkpoint=True for the newest good one."
                )
        elif Path(folder, TRAINER_STATE_NAME).is_file():
            logger.warning("The checkpoint %s has no manifest, so its files cannot be checked.", folder)
        else:
            raise UserError(
                f"resume_from_checkpoint={folder!r} is no checkpoint: it has no {TRAINER_STATE_NAME}. Give one, or "
                "True for the newest good one of output_dir. To start from a model's weights, give it as the model."
            )

    def _faults(self, folder: str) -> list[str]:
        """Return a checkpoint's faults; processes that share it each look at a part of its files."""
        share = (self._processes.index, self._processes.count) if self._shares_disk else (0, 1)
        return sum(self._processes.all_gather_object(folders.find_faults(folder, share)), [])

    def _local(self, checkpoint: str) -> str:
        """Return a folder of this host with the files of a checkpoint, which may be at a URL.

        The first rank of each host downloads it for all of them. Ranks of one host are neighbors.
        """
        self.drop_download()
        gather, leads = self._processes.all_gather_object, self._processes.is_first_of_host
        copy = local_copy(checkpoint) if leads else nullcontext()
        folders = gather(on_all_ranks(lambda: self._download.enter_context(copy), gather))
        return str([folder for folder in folders[: self._processes.index + 1] if folder is not None][-1])
