"""The order of rows (random or grouped by prompt), and data loaders on the host for models sharded over devices."""

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler, SkipBatchSampler, SkipDataLoader
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler
from torch.utils.data import Dataset as TorchDataset
from transformers import TrainingArguments
from transformers.trainer_utils import seed_worker

from ..errors import UserError
from ..packing.pack import in_order
from .kinds import answers_of
from .length_stats import RAW_BY_PREPARED, is_prepared, kind_of_dataset, length_stats, prompt_groups, shared_prefixes

logger = logging.getLogger(__name__)

_MIN_PROMPT = 8  # fewest tokens of a common prefix that count as a prompt, for data without the column `prompt`


def prompts_in_training(train: Any, evaluation: Any, name: str = "") -> tuple[int, ...]:
    """Return the number of distinct evaluation prompts that also occur in the training data, and of all of them.

    Logs a warning if any prompt occurs in both. Returns an empty tuple for streams. A prompt is the value of the
    column `prompt`. Without this column it is the common prefix of a row's answers, if it is at least 8 tokens longer
    than the common prefix of all rows.

    Args:
        name: Name of the evaluation data, if there are several evaluation datasets.
    """
    both = (train, evaluation)
    if not all(map(is_prepared, both)):
        return ()
    texts = [RAW_BY_PREPARED.get(data, data) for data in both]
    if all("prompt" in data.column_names for data in texts):
        train_prompts, prompts = ({hash(json.dumps(value)) for value in data["prompt"] if value} for data in texts)
    else:
        min_bytes = [4 * (length_stats(data).shared_prefix + _MIN_PROMPT) for data in both]
        train_prompts, prompts = (
            {hash(ids) for ids in shared_prefixes(data) if len(ids) >= size}
            for data, size in zip(both, min_bytes, strict=True)
        )
    # a single prompt in all rows does not count
    shared = len(train_prompts & prompts) if len(train_prompts | prompts) > 1 else 0
    if shared:
        source = f" of {name!r}" if name else ""
        logger.warning(f"{shared:,} of {len(prompts):,} evaluation prompts{source} also occur in the training data.")
    return shared, len(prompts)


class PromptGroupSampler(Sampler[int]):
    """Sampler that keeps each prompt group's rows together; the order changes each epoch, and all processes agree.

    The order of groups is random. The order of updates is random too, so that a large group does not fill several
    consecutive updates.

    Args:
        group_N: Group number of each row, from `prompt_groups`.
        update_size: Rows per update, over all processes.
        seed: Seed of the run.
    """

    def __init__(self, group_N: np.ndarray, update_size: int, seed: int = 0) -> None:
        self._group_N, self._update_size, self._seed, self._epoch = group_N, update_size, seed, 0

    def __len__(self) -> int:
        return len(self._group_N)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that decides the next order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator, count = np.random.default_rng([self._seed, self._epoch]), len(self)
        order_N = np.lexsort((generator.permutation(count), generator.permutation(count)[self._group_N]))
        whole = count - count % self._update_size
        yield from generator.permutation(order_N[:whole].reshape(-1, self._update_size)).ravel().tolist()
        yield from order_N[whole:].tolist()
        self._epoch += 1


def prompt_group_sampler(sampler_fn: Callable[[Any], Any], args: Any, parts: int, dataset: Any) -> Any:
    """Return a sampler that keeps rows with the same prompt together; a subclass's own sampler is kept.

    Args:
        sampler_fn: Returns the trainer's sampler for a dataset.
        args: Settings of the run.
        parts: Number of parts of a batch that different processes compute.
        dataset: Prepared rows.
    """
    sampler = sampler_fn(dataset)
    if type(sampler) is not RandomSampler:
        return sampler
    update_size = args.train_batch_size * parts * args.gradient_accumulation_steps
    seed = args.seed if args.data_seed is None else args.data_seed
    return PromptGroupSampler(prompt_groups(dataset), update_size, seed)


_SAMPLED_ROWS = 2048  # rows whose tokens are read to estimate how many tokens are shared


def sizes_by_prompt(dataset: Any, batch_size: int) -> np.ndarray:
    """Return how many tokens each row adds to batches in the order of `PromptGroupSampler`, and log the savings.

    The last ``batch_size`` sizes are the full sizes of the largest rows, with nothing shared. So shapes that are
    planned for these sizes can hold any batch.

    Raises:
        UserError: The data is a stream, or has no pairs.
    """
    if not is_prepared(dataset) or not kind_of_dataset(dataset).are_pairs:
        raise UserError("group_by_prompt=True reorders pairs, but train_dataset is a stream, or has no pairs.")
    stats, group_N = length_stats(dataset), prompt_groups(dataset)
    order_N, added = list(PromptGroupSampler(group_N, batch_size)), list[int]()
    for first in range(0, min(_SAMPLED_ROWS, len(order_N)), batch_size):
        rows = map(dataset.__getitem__, order_N[first : first + batch_size])
        sequences = [np.asarray(ids) for row in rows for ids in answers_of(row)]
        order, shared = in_order(sequences)
        added_D = np.array([len(ids) for ids in sequences])
        added_D[order] -= [stats.shared_prefix, *shared]
        added += added_D.reshape(-1, 2).sum(axis=1).tolist()
    grouped, alone = np.mean(added), stats.lengths.sizes_N.mean() - stats.shared_prefix
    logger.warning(
        f"group_by_prompt: {len(group_N):,} rows have {group_N.max() + 1:,} prompts. A row in packed batches of "
        f"{batch_size} takes {grouped:,.0f} tokens, not {alone:,.0f} ({1 - grouped / alone:.0%} less), not counting "
        "the prefix that all rows share."
    )
    sizes_N = np.resize(added, len(dataset)) + stats.shared_prefix
    return np.append(sizes_N, np.sort(stats.lengths.sizes_N)[-batch_size:])


# settings of a DataLoader; in TrainingArguments their names begin with "dataloader_"
_LOADER_SETTINGS = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context", "pin_memory")


def host_batches(
    dataset: TorchDataset[Any],
    collate: Callable[[list[Any]], Any],
    batch_size: int,
    sampler: Sampler[int] | None,
    args: TrainingArguments,
) -> DataLoader[Any]:
    """Return a torch DataLoader with the loader settings of ``args``, without accelerate's wrapper.

    accelerate's loader would replicate batches and lose its settings on resume. The order of rows is the same as
    with accelerate. Workers have the same random seeds on all hosts: hosts that share a mesh each make the whole
    batch, so they must augment rows alike.
    """
    settings: dict[str, Any] = {name: getattr(args, f"dataloader_{name}") for name in (*_LOADER_SETTINGS, "drop_last")}
    seed = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=0)
    settings["worker_init_fn"] = partial(ignore_foreign_sigterm, seed)
    config: Any = args.accelerator_config  # TrainingArguments has converted dicts and files
    # accelerate's sampler has a new permutation for each (seed, epoch); a sampler that a subclass chose is kept
    if type(sampler) is RandomSampler and config.use_seedable_sampler:
        sampler = SeedableRandomSampler(cast(Sized, dataset), generator=torch.Generator(), data_seed=args.data_seed)
    return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=collate, **settings)


def skip_batches(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """Return the loader without its first ``count`` batches; a user's own torch DataLoader works too."""
    settings = {name: getattr(loader, name) for name in (*_LOADER_SETTINGS, "collate_fn", "worker_init_fn")}
    if isinstance(loader.dataset, IterableDataset):
        return SkipDataLoader(
            loader.dataset, skip_batches=count, batch_size=loader.batch_size, drop_last=loader.drop_last, **settings
        )
    return DataLoader(loader.dataset, batch_sampler=SkipBatchSampler(loader.batch_sampler, count), **settings)


class UnsplitStream(IterableDataset[Any]):
    """Wrapper that hides the files of a `datasets` stream: each process reads the whole stream and takes its part.

    Without it, accelerate would assign the files of a stream to processes. Then the rows of a batch would depend on
    the number of processes, and processes would get different numbers of rows.

    Args:
        stream: Stream of rows.
        batch_size: The stream yields (row, is_real), and is padded to a multiple of this many rows with rows that are
            not real. With 1, accelerate pads the last batch, and these rows count as real.
    """

    def __init__(self, stream: Any, batch_size: int) -> None:
        self._stream, self._batch_size = stream, batch_size

    def set_epoch(self, epoch: int) -> None:
        self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        count, first = 0, None
        for count, row in enumerate(self._stream, start=1):
            first = row if count == 1 else first
            yield row, True
        yield from [(first, False)] * (-count % self._batch_size)


def collate_marked(
    collate: Callable[..., Any], select_columns: Callable[[list[Any]], list[Any]], marked: Sequence[tuple[Any, bool]]
) -> Any:
    """Collate the selected columns of a `UnsplitStream`'s marked rows; padding does not count."""
    rows, is_real = zip(*marked, strict=True)
    return collate(select_columns(list(rows)), real=sum(is_real))


def begin_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader, its dataset and its samplers: accelerate's loaders do not always pass it on."""
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    parts: tuple[Any, ...] = (loader, getattr(loader, "dataset", None), batches, getattr(batches, "sampler", None))
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def rows_of_step(loader: Any, step: int, accumulated: int) -> list[int] | None:
    """Return the dataset rows that training step ``step`` used, in the sampler's order; steps are counted from 1.

    Returns None if the rows are unknown: for a stream, or a sampler with another order each time it is iterated.

    Args:
        accumulated: Batches per step.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset) or getattr(loader, "batch_sampler", None) is None:
        return None
    epoch, update = divmod(step - 1, -(-len(loader) // accumulated))
    orders = []
    for _ in range(2):
        begin_epoch(loader, epoch)
        batches = islice(loader.batch_sampler, update * accumulated, (update + 1) * accumulated)
        orders.append([row for batch in batches for row in batch])
    return orders[0] if orders[0] == orders[1] else None


def ignore_foreign_sigterm(init: Callable[[int], None] | None, worker: int) -> None:
    """Initialize a loader's worker with ``init``, and make it ignore SIGTERM from processes other than its parent.

    A machine that shuts down sends SIGTERM to all processes; without workers the main process could not end its step.
    """
    if init is not None:
        init(worker)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey_parent, daemon=True).start()


def _obey_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
