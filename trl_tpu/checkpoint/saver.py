"""How a checkpoint is saved: one road, from the devices to the disk, beside training.

1. The save before it is waited for, and the staging folder is made.
2. Training stops: what is small is written (config, tokenizer, numbers, random states), and the tensors are copied to
   the host, by each process those that its devices hold.
3. Training goes on. A thread writes the tensors, seals the folder with a manifest, renames it (or uploads it, the
   manifest last), and deletes older checkpoints.

A save that fails is loud and counted, and leaves nothing behind; training goes on.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import getitem
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from ..modeling.stacked import by_layer
from ..runtime import Runtime
from .background import BackgroundSaves
from .manifest import (
    MANIFEST_FILE,
    Files,
    describe_files,
    files_in,
    publish,
    retire,
    seal,
    surplus_checkpoints,
)
from .remote import RemoteRun
from .run_folder import RunFolder
from .state_dict import STATE_FOLDER, are_in_model_files, state_tensors, trained_weights
from .storage import join_shards, write_model_files, write_state

logger = logging.getLogger(__name__)


class Processes(Protocol):
    """The processes that save or load together."""

    index: int
    count: int

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
        save_weights: Writes whole weights on the host to a folder, as transformers does.
        best: The name of the checkpoint that must not be deleted.
    """

    name: str
    run: RunFolder
    describe: Callable[[Path], None]
    model: nn.Module | None
    optimizer: Optimizer | None
    save_weights: Callable[[Path, dict[str, Any]], None]
    best: str | None


@dataclass(frozen=True)
class _OnHost:
    """Copies of tensors, of each what this process's devices hold."""

    weights: dict[str, Any]  # for model files
    state: dict[str, Any]
    own_names: bool  # whether model files have each weight under its own name


class Checkpointer:
    """Saves checkpoints of a run beside its training.

    Args:
        runtime: Of the tensors.
        processes: All that train.
        writes: Whether this process writes what is small, and publishes: one of those that share a disk.
        shares_disk: Whether all processes write to one folder, rather than each to a disk of its own.
        limit: How many checkpoints stay; None for all.
        remote: Where the run is kept, if that is a URL.
    """

    def __init__(
        self,
        runtime: Runtime,
        processes: Processes,
        *,
        writes: bool,
        shares_disk: bool,
        limit: int | None,
        remote: RemoteRun | None,
    ) -> None:
        self._runtime, self._processes = runtime, processes
        self._writes, self._shares_disk = writes, shares_disk
        self._takes_part = runtime.shares_mesh or writes  # has tensors to write
        self._limit, self._remote = limit, remote
        self.latest = ""
        """The folder, or URL, of the last save that was begun."""
        self._background = BackgroundSaves()

    @property
    def failed(self) -> list[str]:
        """Where checkpoints should be that could not be saved."""
        return self._background.failed

    def wait(self) -> None:
        """Wait until what was begun is saved, or has failed."""
        self._background.wait()

    def save(self, contents: Contents) -> None:
        """Copy the state, and write it as a checkpoint beside training. All processes take part."""
        began = time.monotonic()
        self.wait()
        self.latest = self._place_of(contents)
        staging = contents.run.staging / contents.name
        on_host: list[_OnHost] = []

        def take() -> None:
            self._runtime.step_boundary()
            contents.describe(staging)
            on_host.append(self._copy_to_host(contents))

        if self._all_could(lambda: self._make_room(staging), contents) and self._all_could(take, contents):
            waited = time.monotonic() - began
            if self._takes_part:
                self._background.submit(
                    self._place_of(contents), lambda: self._write(contents, staging, on_host[0], waited)
                )

    # ---- while training stops

    def _place_of(self, contents: Contents) -> str:
        """Return the folder, or URL, of a checkpoint."""
        if self._remote is not None:
            return f"{self._remote.url}/{contents.name}"
        return str(contents.run.path / contents.name)

    def _make_room(self, staging: Path) -> None:
        if self._makes_folder:
            shutil.rmtree(staging.parent, ignore_errors=True)  # left by a save that was killed
            staging.mkdir(parents=True)

    def _copy_to_host(self, contents: Contents) -> _OnHost:
        """Copy tensors, each once, and name those of every layer after it."""
        model, optimizer, runtime = contents.model, contents.optimizer, self._runtime
        if model is None or not self._takes_part:
            return _OnHost({}, {}, False)
        one_process = runtime.topology().process_count == 1
        own_names = one_process and are_in_model_files(model)
        files = trained_weights(model) if one_process else {}
        state = {} if optimizer is None else state_tensors(model, optimizer, with_weights=not own_names)
        marked = {f"file {name}": tensor for name, tensor in files.items()}
        marked |= {f"state {name}": tensor for name, tensor in state.items()}
        shards = by_layer(model, runtime.local_shards(marked), getitem)
        return _OnHost(_marked("file ", shards), _marked("state ", shards), own_names)

    def _all_could(self, action: Callable[[], None], contents: Contents) -> bool:
        """Return whether every process could do its part; else the save has failed on all."""
        failure = failure_anywhere(action, self._processes.all_gather_object)
        if failure is not None:
            self._background.fail(self._place_of(contents), failure)
            self._clean_up(contents)
        return failure is None

    # ---- beside training, on a thread; on several hosts all take part

    def _write(self, contents: Contents, staging: Path, on_host: _OnHost, waited: float) -> None:
        began = time.monotonic()
        try:
            checksums: dict[str, str] = {}
            self._together(lambda: checksums.update(self._write_tensors(contents, staging, on_host)))
            files = self._describe_files(staging, checksums)
            if (remote := self._remote) is not None:
                # what a run on another mesh left there would be read with these files
                self._together(lambda: remote.delete(contents.name), by_writer=True)
                self._together(lambda: remote.put(staging, files_in(staging), contents.name))
            # the manifest comes last, and no host goes on before the checkpoint is there
            self._together(lambda: self._publish(contents, staging, files), by_writer=True)
        finally:
            self._clean_up(contents)
        took = time.monotonic() - began
        logger.info(
            "%s: training waited %.2f s, writing took %.2f s beside it.", self._place_of(contents), waited, took
        )

    def _write_tensors(self, contents: Contents, staging: Path, on_host: _OnHost) -> dict[str, str]:
        """Write all tensors; returns the checksums of files that were made meanwhile."""
        checksums: dict[str, str] = {}
        if on_host.weights:
            weights = join_shards(on_host.weights)
            if on_host.own_names:
                checksums |= write_model_files(weights, staging)
            else:
                contents.save_weights(staging, weights)
        if on_host.state:
            written = write_state(on_host.state, staging / STATE_FOLDER, self._runtime)
            checksums |= {f"{STATE_FOLDER}/{file}": sha256 for file, sha256 in written.items()}
        return checksums

    def _describe_files(self, staging: Path, checksums: dict[str, str]) -> Files:
        """Return sizes and checksums of all files of all hosts; of its own alone where each seals its own disk."""
        own = slice(None)
        if self._shares_disk:
            checksums = {file: sha256 for each in self._meet(checksums) for file, sha256 in each.items()}
            topology = self._runtime.topology()
            own = slice(topology.process_index, None, topology.process_count)
        names = files_in(staging)[own]  # after all have met: every host has written its files
        described: Files = {}
        self._together(lambda: described.update(describe_files(staging, names, checksums)))
        if not self._shares_disk and self._remote is None:
            return described
        return {name: file for each in self._meet(described) for name, file in each.items()}

    def _publish(self, contents: Contents, staging: Path, files: Files) -> None:
        """Make the checkpoint visible, and only then delete older ones."""
        contents.run.check_owner()
        if self._remote is not None:
            seal(staging, files, contents.run.run)
            self._remote.put(staging, [MANIFEST_FILE], contents.name)
            with _or_left_there(self._remote.url):
                self._remote.rotate(self._limit, contents.best, contents.name)
            return
        final = contents.run.path / contents.name
        publish(staging, final, files, contents.run.run)
        best = None if contents.best is None else contents.run.path / contents.best
        with _or_left_there(str(contents.run.path)):
            for surplus in surplus_checkpoints(final, self._limit, best):
                retire(surplus, staging.parent)

    def keep_best_alone(self, run: RunFolder, best: str) -> None:
        """Delete the last checkpoint at the end of training, where one may stay and the best is another."""
        if self._limit != 1 or not self._writes:
            return
        if self._remote is not None:
            with _or_left_there(self._remote.url):
                self._remote.rotate(1, best, best)
            return
        with _or_left_there(str(run.path)):
            for surplus in surplus_checkpoints(run.path / best, 1, None):
                retire(surplus, run.staging)
            run.clear_staging()

    def _meet(self, value: Any = None) -> list[Any]:
        """Return what the saving threads of all hosts give."""
        return self._runtime.all_gather_object(value, while_saving=True)

    def _together(self, action: Callable[[], None], by_writer: bool = False) -> None:
        """Act on the saving threads of all hosts, or on the writer's alone; raise on all what any one raised."""
        acts = self._writes or not by_writer
        if (failure := failure_anywhere(action if acts else lambda: None, self._meet)) is not None:
            raise failure

    @property
    def _makes_folder(self) -> bool:
        return self._writes or (self._takes_part and not self._shares_disk)

    def _clean_up(self, contents: Contents) -> None:
        if self._makes_folder:  # also when the disk is full
            contents.run.clear_staging()


@contextlib.contextmanager
def _or_left_there(place: str) -> Iterator[None]:
    """Delete older checkpoints, or say why they are left there: the newest one is whole without that."""
    try:
        yield
    except Exception as error:  # file systems of fsspec say it in errors of many kinds
        logger.warning("Older checkpoints in %s could not be deleted (%s: %s).", place, type(error).__name__, error)


def _marked(mark: str, shards: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(mark): shard for name, shard in shards.items() if name.startswith(mark)}


def failure_anywhere(action: Callable[[], None], all_gather_object: Callable[[Any], list[Any]]) -> Exception | None:
    """Call ``action`` in every process; return why it failed in this one, or else in the first where it did.

    Libraries say that a disk is full in errors of many kinds.
    """
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    said = all_gather_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    elsewhere = next((each for each in said if each is not None), None)
    return failure if failure is not None or elsewhere is None else OSError(f"on another host: {elsewhere}")
