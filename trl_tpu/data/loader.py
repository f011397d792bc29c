"""The order of pairs, by prompts too, and batches on the host for a device that wants planned shapes."""

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
import torch.distributed
import transformers.trainer
from accelerate import PartialState
from accelerate.data_loader import SeedableRandomSampler, SkipBatchSampler, SkipDataLoader
from datasets import Dataset
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler
from torch.utils.data import Dataset as TorchDataset
from transformers import TrainingArguments
from transformers.trainer_utils import seed_worker

from ..errors import UserError
from ..packing.pack import in_order
from .length_stats import PAIR, answers_of, has_row_format, is_prepared, length_stats, rows_of

logger = logging.getLogger(__name__)

_PROMPT = 8  # the fewest tokens that are taken for a prompt, where nothing else tells

_MORE = 16  # the first tokens that a pair's answers may have in common, of which nothing tells that they are no prompt


def prompt_groups(dataset: Dataset) -> np.ndarray:
    """Number the pairs of token ids, so that those that share a prompt have the same number [N].

    What a pair's dialogues share is the prompt, and some more tokens if its answers begin alike. So a prompt is what
    the dialogues of some pair share, and its pairs are those whose dialogues share it and at most a few tokens more.
    What all dialogues of the dataset share, a system prompt say, is none.
    """
    prompt_of: dict[bytes, bytes] = {}  # of what a pair's dialogues share
    around = [b""]  # in lexicographic order, the prompts that what comes next may begin with
    skip = length_stats(dataset).shared_prefix
    for shared in sorted(set(_shared_prompts(dataset, skip))):
        while not shared.startswith(around[-1]):
            around.pop()
        if not around[-1] or len(shared) - len(around[-1]) > 4 * _MORE:
            around.append(shared)
        prompt_of[shared] = around[-1]
    numbers: dict[bytes | int, int] = {}
    keys = (prompt_of[shared] or pair for pair, shared in enumerate(_shared_prompts(dataset, skip)))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _shared_prompts(dataset: Dataset, skip: int) -> Iterator[bytes]:
    """Yield the common prefix of each row's answers, 4 bytes for each token, without the first ``skip`` tokens."""
    for row, prefix in zip(rows_of(dataset), length_stats(dataset).lengths.prefix_P.tolist(), strict=True):
        yield answers_of(row)[0][skip:prefix].tobytes()


def prompts_in_training(train: Any, evaluation: Any, name: str = "") -> tuple[int, ...]:
    """Return how many distinct prompts of prepared evaluation data the training data has too, and their number.

    Any are also logged. Empty for streams. A prompt is the column `prompt`, or else the tokens that a row's answers
    begin with alike, if they are several more than all rows share.

    Args:
        name: That of the evaluation data, if it is one of several.
    """
    both = (train, evaluation)
    if not all(map(is_prepared, both)):
        return ()
    if all("prompt" in each.column_names for each in both):
        known, prompts = ({hash(json.dumps(value)) for value in each["prompt"] if value} for each in both)
    else:
        least = [4 * (length_stats(each).shared_prefix + _PROMPT) for each in both]
        known, prompts = (
            {hash(ids) for ids in _shared_prompts(each, 0) if len(ids) >= size}
            for each, size in zip(both, least, strict=True)
        )
    shared = len(known & prompts) if len(known | prompts) > 1 else 0  # one prompt for all rows is none
    if shared:
        of = f" of {name!r}" if name else ""
        logger.warning(f"{shared:,} of {len(prompts):,} evaluation prompts{of} also occur in the training data.")
    return shared, len(prompts)


class ByPrompt(Sampler[int]):
    """Hands out each group's pairs one after another, in another order each epoch, which is the same everywhere.

    The groups' order is random, and so is that of updates: those that one group fills do not follow one another.

    Args:
        group_N: From `prompt_groups`.
        pairs: Of an update, over all processes.
        seed: Of the run.
    """

    def __init__(self, group_N: np.ndarray, pairs: int, seed: int = 0) -> None:
        self._group_N, self._pairs, self._seed, self._epoch = group_N, pairs, seed, 0

    def __len__(self) -> int:
        return len(self._group_N)

    def set_epoch(self, epoch: int) -> None:
        """Choose the next order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator, count = np.random.default_rng([self._seed, self._epoch]), len(self)
        order_N = np.lexsort((generator.permutation(count), generator.permutation(count)[self._group_N]))
        whole = count - count % self._pairs
        yield from generator.permutation(order_N[:whole].reshape(-1, self._pairs)).ravel().tolist()
        yield from order_N[whole:].tolist()
        self._epoch += 1


def by_prompt(sampler_fn: Callable[[Any], Any], args: Any, parts: int, dataset: Any) -> Any:
    """Return the order in which pairs that share a prompt are together; a subclass's own order stays.

    Args:
        sampler_fn: Returns the order that a trainer would take of a dataset.
        args: The run's settings.
        parts: How many parts of a batch different processes compute.
        dataset: Prepared pairs.
    """
    sampler = sampler_fn(dataset)
    if type(sampler) is not RandomSampler:
        return sampler
    pairs = args.train_batch_size * parts * args.gradient_accumulation_steps
    return ByPrompt(prompt_groups(dataset), pairs, args.seed if args.data_seed is None else args.data_seed)


_DRAWN = 2048  # pairs whose tokens are read to know what they share


def sizes_by_prompt(dataset: Any, pairs: int) -> np.ndarray:
    """Return the tokens that pairs add to batches in the order of `ByPrompt`, and log what that saves.

    The last ``pairs`` are the largest pairs by themselves, so that what holds these sizes holds any batch.

    Raises:
        UserError: For a stream, and for rankings.
    """
    if not has_row_format(dataset, PAIR):
        raise UserError(
            "group_by_prompt=True puts pairs into an order of its own, but train_dataset is a stream, which has its "
            "order, or has rankings, whose prompts are together: load a stream whole (without dataset_streaming), or "
            "leave group_by_prompt out."
        )
    measured, group_N = length_stats(dataset), prompt_groups(dataset)
    order_N, added = list(ByPrompt(group_N, pairs)), list[int]()
    for first in range(0, min(_DRAWN, len(order_N)), pairs):
        rows = map(dataset.__getitem__, order_N[first : first + pairs])
        sequences = [np.asarray(ids) for row in rows for ids in answers_of(row)]
        order, shared = in_order(sequences)
        added_D = np.array([len(ids) for ids in sequences])
        added_D[order] -= [measured.shared_prefix, *shared]
        added += added_D.reshape(-1, 2).sum(axis=1).tolist()
    here, alone = np.mean(added), measured.lengths.sizes_P.mean() - measured.shared_prefix
    logger.warning(
        f"group_by_prompt: {len(group_N):,} pairs have {group_N.max() + 1:,} prompts. A pair in packed batches of "
        f"{pairs} takes {here:,.0f} tokens, not {alone:,.0f} ({1 - here / alone:.0%} less), beside what all share."
    )
    sizes_N = np.resize(added, len(dataset)) + measured.shared_prefix
    return np.append(sizes_N, np.sort(measured.lengths.sizes_P)[-pairs:])


# a DataLoader's settings, which TrainingArguments has with "dataloader_" before their names
_SETTINGS = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context")


def training_order(dataset: TorchDataset[Any], sampler: Sampler[int], seed: int | None) -> Sampler[int]:
    """Return the order in which accelerate would hand out the pairs: a fresh permutation for each (seed, epoch).

    Only a plain `RandomSampler` is replaced; a sampler that a subclass or an argument chose keeps its own order.
    """
    if type(sampler) is not RandomSampler:
        return sampler
    return SeedableRandomSampler(data_source=cast(Sized, dataset), generator=torch.Generator(), data_seed=seed)


def host_batches(
    dataset: TorchDataset[Any],
    collate: Callable[[list[Any]], Any],
    batch_size: int,
    sampler: Sampler[int] | None,
    args: TrainingArguments,
) -> DataLoader[Any]:
    """Return a torch DataLoader with the loader settings of ``args``, without accelerate around it.

    accelerate's would replicate batches, and forget its settings on resume; the order of pairs is the one it has.
    Workers that augment rows draw alike on all hosts that share a mesh, where each makes the whole batch.
    """
    settings: dict[str, Any] = {name: getattr(args, f"dataloader_{name}") for name in (*_SETTINGS, "drop_last")}
    seed = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=0)
    settings["worker_init_fn"] = partial(outlive_sigterm, seed)
    config: Any = args.accelerator_config  # the config has read its other forms
    if sampler is not None and config.use_seedable_sampler:
        sampler = training_order(dataset, sampler, args.data_seed)
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


@contextmanager
def main_processes_first() -> Iterator[None]:
    """Let the main process work first, then that of each node, then all: the others find its work in a cache.

    Where one process drives all devices of a host, as on XLA, none is waited for: hosts need not share a cache.
    """
    if not torch.distributed.is_initialized() or PartialState().num_processes == 1:
        yield
        return
    with PartialState().main_process_first(), PartialState().local_main_process_first():
        yield
