"""The masks of a tight row's trees, and attention by them, tree by tree."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

# Queries are taken in blocks of about this many, since a block's keys end with its last query.
_QUERIES = 192


class TreeMasks(NamedTuple):
    """The masks of the trees in one tight row: first column, the column after the last, and mask [1, 1, S, S].

    A tree that is a single dialogue has the mask that the model would have had for it alone, or None where it is
    causal: attention functions have a faster way for that.
    """

    trees: tuple[tuple[int, int, torch.Tensor | None], ...]

    def of(self, columns: Sequence[int], device: torch.device) -> "QueryMasks":
        """The masks of some queries only: those in ``columns``, ascending, of which each tree has one or more."""
        masks = []
        for start, stop, mask in self.trees:
            here = columns[bisect_left(columns, start) : bisect_left(columns, stop)]
            queries_Q = torch.tensor(here, device=device) - start
            keys_S = torch.arange(stop - start, device=device)
            # a mask that was left out is causal
            mask_11QS = keys_S <= queries_Q[None, None, :, None] if mask is None else mask[:, :, queries_Q]
            masks.append((start, stop, queries_Q, mask_11QS))
        return QueryMasks(tuple(masks))


class QueryMasks(NamedTuple):
    """For some queries of each tree: its first column, the one after its last, the queries in it, their masks."""

    trees: tuple[tuple[int, int, torch.Tensor, torch.Tensor], ...]


class TreeByTree:
    """A registered attention function that computes a tight row's trees one at a time.

    Args:
        plain: The attention function for ordinary batches and masks.
    """

    def __init__(self, plain: Callable[..., tuple[torch.Tensor, Any]]) -> None:
        self.plain = plain

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | TreeMasks | QueryMasks | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        def plain(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
            return self.plain(module, query, key, value, mask, *args, **kwargs)[0]

        if isinstance(attention_mask, TreeMasks):
            return _of_all(plain, query, key, value, attention_mask), None
        if isinstance(attention_mask, QueryMasks):
            return _of_some(plain, query, key, value, attention_mask), None
        return self.plain(module, query, key, value, attention_mask, *args, **kwargs)


Attend = Callable[..., torch.Tensor]


def _of_all(
    plain: Attend, query_1NLD: torch.Tensor, key_1NLD: torch.Tensor, value_1NLD: torch.Tensor, masks: TreeMasks
) -> torch.Tensor:
    outputs = []
    runs = list(_runs(masks.trees))
    # cut at once: the backward of slices would write a row of zeros for each
    sizes = [length * count for length, count, _ in runs]
    parts = (tensor.split(sizes, dim=2) for tensor in (query_1NLD, key_1NLD, value_1NLD))
    for (length, count, mask), query, key, value in zip(runs, *parts, strict=True):
        if mask is None:
            # trees of one length are rows of one batch
            rows = (tensor[0].unflatten(1, (count, length)).transpose(0, 1) for tensor in (query, key, value))
            outputs.append(plain(*rows, None).flatten(0, 1)[None])
            continue
        blocks = query.split(-(-length // max(1, round(length / _QUERIES))), dim=2)
        first = 0
        for block in blocks:
            # keys after the block's last query are seen by none of it
            last = first + block.shape[2]
            outputs.append(plain(block, key[:, :, :last], value[:, :, :last], mask[:, :, first:last, :last]))
            first = last
    return torch.cat(outputs, dim=1)


def _runs(trees: Sequence[tuple[int, int, torch.Tensor | None]]) -> Iterator[tuple[int, int, torch.Tensor | None]]:
    """Length, number and mask of trees; equally long ones without a mask that follow one another are one run."""

    def kind(tree: tuple[int, int, torch.Tensor | None]) -> tuple[bool, int]:
        return tree[2] is not None, tree[1] - tree[0]

    for (has_mask, length), group in itertools.groupby(trees, key=kind):
        members = list(group)
        if has_mask:
            yield from ((length, 1, mask) for _, _, mask in members)
        else:
            yield length, len(members), None


def _of_some(
    plain: Attend, query_1NLD: torch.Tensor, key_1NLD: torch.Tensor, value_1NLD: torch.Tensor, masks: QueryMasks
) -> torch.Tensor:
    """The outputs [1, L, N, D] of some queries, and zeros for the others."""
    starts, stops, queries_of, masks_of = zip(*masks.trees, strict=True)
    columns_S = torch.cat([start + queries_Q for start, queries_Q in zip(starts, queries_of, strict=True)])
    queries = query_1NLD.index_select(2, columns_S).split([len(queries_Q) for queries_Q in queries_of], dim=2)
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    keys, values = key_1NLD.split(sizes, dim=2), value_1NLD.split(sizes, dim=2)
    outputs = map(plain, queries, keys, values, masks_of)
    output_1SND = torch.cat(list(outputs), dim=1)
    shape = (1, query_1NLD.shape[2], *output_1SND.shape[2:])
    return output_1SND.new_zeros(shape).index_copy(1, columns_S, output_1SND)
