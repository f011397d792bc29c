"""How a checkpoint is saved: one way, from the devices to the disk, beside training.

1. The save before it is waited for, and the staging folder is made.
2. Training stops: what is small is written (config, tokenizer, numbers, random states), and the tensors are copied to
   the host, by each process those that its devices hold.
3. Training goes on. A thread writes the tensors, seals the folder with a manifest, renames it (or uploads it, the
   manifest last), and deletes older checkpoints.

A save that fails is loud and counted, and leaves nothing behind; training goes on.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import getitem
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.optim import Optimizer

from ..modeling.layers import by_layer
from ..runtime import Runtime
from .manifest import MANIFEST_FILE, Files, describe_files, discard, files_in, publish, seal, staging_of
from .run_folder import RunFolder
from .state_dict import (
    STATE_FOLDER,
    are_in_model_files,
    join_shards,
    state_tensors,
    tensors_in,
    trained_weights,
    write_model,
    write_state,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Processes(Protocol):
    """The processes that save or load together."""

    index: int
    count: int
    is_first_of_host: bool

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return what every process gave."""


@dataclass(frozen=True)
class Contents:
    """What goes into a checkpoint.

    Args:
        name: Of its folder, ``checkpoint-12``.
        run: Where it goes.
        describe: Writes what is small to a folder. All processes call it.
        model: Whose weights are saved; None where `describe` has written them.
        optimizer: Whose state is saved; None for a checkpoint of the model alone.
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
        return staging_of(self.run.path / self.name)


class Checkpointer:
    """Saves checkpoints of a run beside its training.

    Args:
        runtime: Of the tensors.
        processes: All that train.
        writes: Whether this process writes what is small, and publishes: one of those that share a disk.
        shares_disk: Whether all processes write to one folder, rather than each to a disk of its own.
        limit: How many checkpoints stay; None for all.
    """

    def __init__(
        self,
        runtime: Runtime,
        processes: Processes,
        *,
        writes: bool,
        shares_disk: bool,
        limit: int | None,
    ) -> None:
        self._runtime, self._processes = runtime, processes
        self._writes, self._shares_disk, self._limit = writes, shares_disk, limit
        self.latest = ""
        """The folder, or URL, of the last save that was begun."""
        self.failed: list[str] = []
        """Where checkpoints should be that could not be saved."""
        self._pending: Future[None] | None = None

    @property
    def _takes_part(self) -> bool:
        """Whether this process has tensors to write."""
        return self._runtime.shards_model or self._writes

    def wait(self) -> None:
        """Wait until what was begun is saved, or has failed."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def settle(self) -> None:
        """Wait for the save in progress, and tell every rank which saves failed. All ranks take part."""
        self.wait()
        self.failed = list(dict.fromkeys(sum(self._processes.all_gather_object(self.failed), [])))

    def save(self, contents: Contents) -> None:
        """Copy the state, and write it as a checkpoint beside training. All processes take part."""
        self.settle()
        self.latest = contents.place
        try:
            together(lambda: self._make_room(contents), self._processes.all_gather_object)
            tensors = together(lambda: self._take(contents), self._processes.all_gather_object)
        except Exception as error:  # whatever a file system, a serializer or another host can say
            self._processes.all_gather_object(None)  # a process that is gone is no save's fault: it ends the run here
            self._fail(contents, error)
            self._clean_up(contents)
            return
        if self._takes_part:
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._pending = thread.submit(self._write, contents, *tensors)
            thread.shutdown(wait=False)  # the thread ends after this save

    def keep_best_alone(self, run: RunFolder, best: str) -> None:
        """Delete the last checkpoint at the end of training, where one may stay and the best is another."""
        if self._limit == 1 and self._writes:
            run.rotate(1, {best})

    # ---- while training stops

    def _make_room(self, contents: Contents) -> None:
        self._clean_up(contents)  # of a save that was killed
        if self._makes_folder(contents):
            contents.staging.mkdir(parents=True)

    def _take(self, contents: Contents) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write what is small, and return copies on the host of what this process's devices hold, each tensor once.

        Tensors of stacked layers are named after each layer.

        Returns:
            Weights for model files, and the state.
        """
        self._runtime.step_boundary()
        contents.describe(contents.staging)
        model, optimizer, runtime = contents.model, contents.optimizer, self._runtime
        if model is None or not self._takes_part:
            return {}, {}
        one_process = runtime.topology().process_count == 1
        # by a `save_model` of the user's, who may have written more than the model, or other weights
        are_written = one_process and bool(tensors_in(contents.staging))
        files = trained_weights(model) if one_process and not are_written else {}
        only_in_files = bool(files) and are_in_model_files(model)
        state = {} if optimizer is None else state_tensors(model, optimizer, with_weights=not only_in_files)
        marked = {f"file {name}": tensor for name, tensor in files.items()}
        marked |= {f"state {name}": tensor for name, tensor in state.items()}
        shards = by_layer(model, runtime.local_shards(marked), getitem)
        return _marked("file ", shards), _marked("state ", shards)

    # ---- beside training, on a thread; on several hosts all take part

    def _write(self, contents: Contents, weights: dict[str, Any], state: dict[str, Any]) -> None:
        staging = contents.staging
        try:
            self._together(lambda: self._write_tensors(contents, weights, state))
            files = self._describe_files(contents)
            if (remote := contents.run.remote) is not None:
                # what a run on another mesh left there would be read with these files
                self._together(lambda: remote.delete(contents.name), by_writer=True)
                self._together(lambda: remote.put(staging, files_in(staging), contents.name))
            # the manifest comes last, and no host goes on before the checkpoint is there
            self._together(lambda: self._publish(contents, files), by_writer=True)
        except Exception as error:
            self._fail(contents, error)
        finally:
            self._clean_up(contents)

    def _write_tensors(self, contents: Contents, weights: dict[str, Any], state: dict[str, Any]) -> None:
        if weights:
            write_model(contents.model, join_shards(weights), contents.staging)
        if state:
            write_state(state, contents.staging / STATE_FOLDER, self._runtime)

    def _describe_files(self, contents: Contents) -> Files:
        """Return sizes and checksums of all files of all hosts; of this one where each seals its disk."""
        own = slice(None)
        if self._shares_disk:
            topology = self._runtime.topology()
            own = slice(topology.process_index, None, topology.process_count)
        names = files_in(contents.staging)[own]  # every host has written its files
        described: Files = self._together(lambda: describe_files(contents.staging, names))
        if not self._shares_disk and contents.run.remote is None:
            return described
        return {name: file for each in self._gather(described) for name, file in each.items()}

    def _publish(self, contents: Contents, files: Files) -> None:
        """Make the checkpoint visible, and only then delete older ones."""
        run, staging = contents.run, contents.staging
        if run.remote is None:
            publish(staging, run.path / contents.name, files)
        else:
            seal(staging, files)
            run.remote.put(staging, [MANIFEST_FILE], contents.name)
        run.rotate(self._limit, {contents.name, contents.best or contents.name})

    def _gather(self, value: Any) -> list[Any]:
        """Return what the saving threads of all hosts give."""
        return self._runtime.all_gather_object(value, while_saving=True)

    def _together(self, action: Callable[[], Any], by_writer: bool = False) -> Any:
        """Act on the saving threads of all hosts, or on the writer's alone; raise on all what any one raised."""
        return together(action if self._writes or not by_writer else lambda: None, self._gather)

    # ---- both

    def _fail(self, contents: Contents, error: Exception) -> None:
        """Count a save that has failed."""
        self.failed.append(contents.place)
        logger.error(
            "%s was NOT saved (%s: %s). Training goes on, and earlier checkpoints stay; make room or mend the folder.",
            contents.place,
            type(error).__name__,
            error,
            exc_info=error,
        )

    def _makes_folder(self, contents: Contents) -> bool:
        """Return whether this process makes the folder: one of those that share a disk; each where it is private."""
        return self._writes or (self._takes_part and contents.run.remote is not None)

    def _clean_up(self, contents: Contents) -> None:
        if self._makes_folder(contents):  # also when the disk is full
            discard(contents.staging)


def _marked(mark: str, shards: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(mark): shard for name, shard in shards.items() if name.startswith(mark)}


def together(action: Callable[[], T], all_gather_object: Callable[[Any], list[Any]]) -> T:
    """Call ``action`` in every process and return what it returns; raise in all if it raised in any one.

    Libraries say that a disk is full in errors of many kinds.

    Raises:
        Exception: What it raised in this process; an OSError where it did in another only.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    said = all_gather_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if (elsewhere := next((each for each in said if each is not None), None)) is not None:
        raise OSError(f"in another process: {elsewhere}")
    return result
