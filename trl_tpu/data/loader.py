"""Pairs in TRL's order, in batches, for a device that wants planned shapes."""

from collections.abc import Callable, Sized
from typing import Any, cast

import torch
from accelerate.data_loader import SeedableRandomSampler, SkipBatchSampler, SkipDataLoader
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from transformers import TrainingArguments

# a DataLoader's settings, which TrainingArguments has with "dataloader_" before their names
_SETTINGS = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context")


def training_order(dataset: Dataset[Any], sampler: Sampler[int], seed: int | None) -> Sampler[int]:
    """The order in which accelerate would hand out the pairs: a fresh permutation for each (seed, epoch).

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
    """A torch DataLoader with the loader settings of ``args``, without accelerate around it."""
    settings: dict[str, Any] = {name: getattr(args, f"dataloader_{name}") for name in _SETTINGS}
    settings["collate_fn"] = collate
    if isinstance(dataset, IterableDataset) or sampler is None:
        return DataLoader(dataset, batch_size=batch_size, drop_last=args.dataloader_drop_last, **settings)
    batches = BatchSampler(sampler, batch_size, drop_last=args.dataloader_drop_last)
    return DataLoader(dataset, batch_sampler=batches, **settings)


def skip_batches(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """The same loader without its first ``count`` batches."""
    settings = {name: getattr(loader, name) for name in (*_SETTINGS, "collate_fn")}
    if isinstance(loader.dataset, IterableDataset):
        return SkipDataLoader(
            loader.dataset, skip_batches=count, batch_size=loader.batch_size, drop_last=loader.drop_last, **settings
        )
    sampler = SkipBatchSampler(loader.batch_sampler, skip_batches=count)
    return DataLoader(loader.dataset, batch_sampler=sampler, **settings)
