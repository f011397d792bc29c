"""Pairs in TRL's order, in batches, for a device that wants planned shapes."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
import transformers.trainer
from accelerate.data_loader import SeedableRandomSampler, SkipBatchSampler, SkipDataLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from transformers import TrainingArguments
from transformers.trainer_utils import seed_worker

# a DataLoader's settings, which TrainingArguments has with "dataloader_" before their names
_SETTINGS = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context")


def training_order(dataset: Dataset[Any], sampler: Sampler[int], seed: int | None) -> Sampler[int]:
    """Return the order in which accelerate would hand out the pairs: a fresh permutation for each (seed, epoch).

    Only a plain `RandomSampler` is replaced; a sampler that a subclass or an argument chose keeps its own order.
    """
    if type(sampler) is not RandomSampler:
        return sampler
    return SeedableRandomSampler(data_source=cast(Sized, dataset), generator=torch.Generator(), data_seed=seed)


def host_batches(
    dataset: Dataset[Any],
    collate: Callable[[list[Any]], Any],
    batch_size: int,
    sampler: Sampler[int] | None,
    args: TrainingArguments,
) -> DataLoader[Any]:
    """Return a torch DataLoader with the loader settings of ``args``, without accelerate around it.

    Workers that augment rows draw alike on all hosts that share a mesh, where each makes the whole batch.
    """
    settings: dict[str, Any] = {name: getattr(args, f"dataloader_{name}") for name in (*_SETTINGS, "drop_last")}
    seed = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=0)
    settings["worker_init_fn"] = partial(outlive_sigterm, seed)
    return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=collate, **settings)


def skip_batches(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """Return the loader without its first ``count`` batches; a script's own loader of torch's class will do."""
    settings = {name: getattr(loader, name) for name in (*_SETTINGS, "collate_fn", "worker_init_fn")}
    if isinstance(loader.dataset, IterableDataset):
        return SkipDataLoader(
            loader.dataset, skip_batches=count, batch_size=loader.batch_size, drop_last=loader.drop_last, **settings
        )
    batches: Any = loader.batch_sampler
    sampler = SkipBatchSampler(batches, skip_batches=count)
    sampler.sampler = getattr(batches, "sampler", None)  # which orders by the epoch that it is told
    return DataLoader(loader.dataset, batch_sampler=sampler, **settings)


@contextmanager
def skipping_by(skip: Callable[[Any, int], Any], loader: Any) -> Iterator[None]:
    """Let transformers' training loop skip the first batches of ``loader`` by ``skip`` while the context lasts.

    accelerate's function, which the loop calls, would rebuild the loader without its sharding.
    """
    theirs = transformers.trainer.skip_first_batches

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        return (skip if dataloader is loader else theirs)(dataloader, num_batches)

    transformers.trainer.skip_first_batches = skip_first_batches
    try:
        yield
    finally:
        transformers.trainer.skip_first_batches = theirs


class WholeStream(IterableDataset[Any]):
    """Hands a stream of datasets' to accelerate as one: each process then reads all of it, and takes its part.

    Of a stream in several files accelerate gives each process some, and so pairs that no other number of processes
    would be given, and not as many as the others.

    Args:
        stream: Of examples.
        batch_size: Pairs of a batch over all processes, where what fills up the last batch is to be told from real
            pairs: examples are then pairs of one and whether it is real. By default accelerate fills it up.
    """

    def __init__(self, stream: Any, batch_size: int | None = None) -> None:
        self._stream, self._batch_size = stream, batch_size

    def set_epoch(self, epoch: int) -> None:
        self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._batch_size is None:
            yield from self._stream
            return
        count, first = 0, None
        for count, example in enumerate(self._stream, start=1):
            first = example if count == 1 else first
            yield example, True
        yield from [(first, False)] * (-count % self._batch_size)


def collate_marked(
    collate: Callable[..., Any], select_columns: Callable[[list[Any]], list[Any]], examples: Sequence[tuple[Any, bool]]
) -> Any:
    """Collate the selected columns of a `WholeStream`'s marked examples: those after the real ones do not count."""
    rows, is_real = zip(*examples, strict=True)
    return collate(select_columns(list(rows)), real=sum(is_real))


def rows_of_step(loader: Any, step: int, accumulated: int) -> list[int] | None:
    """Return the rows of the dataset whose pairs ``step`` took, the first being 1, in the sampler's order.

    None where they cannot be known: for a stream, or a sampler that gives another order when it is asked again.

    Args:
        accumulated: Batches of a step.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset) or getattr(loader, "batch_sampler", None) is None:
        return None
    epoch, update = divmod(step - 1, -(-len(loader) // accumulated))
    orders = []
    for _ in range(2):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        batches = islice(loader.batch_sampler, update * accumulated, (update + 1) * accumulated)
        orders.append([row for batch in batches for row in batch])
    return orders[0] if orders[0] == orders[1] else None


def outlive_sigterm(init: Callable[[int], None] | None, worker: int) -> None:
    """Begin a loader's worker with ``init``, and let only its parent end it by SIGTERM.

    A machine that shuts down sends SIGTERM to all processes; without its workers the main one could not end its step.
    """
    if init is not None:
        init(worker)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey_parent, daemon=True).start()


def _obey_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
