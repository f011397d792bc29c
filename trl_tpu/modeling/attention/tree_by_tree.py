"""Attends in an unpadded row tree by tree, and where a model's attention is causal, tail by tail.

Causal attention over a dialogue has a faster way than a mask in most attention functions, which leaves out what is not
seen. So a tree's first dialogue goes that way, and each tail after it attends to its own path only. Where a model has
another rule, as a window, a tree has a mask.

Letters: L columns of the row, S of a tree, T of a tail, Q queries, K keys, N heads, D features of a head.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...packing.trie import Tail, Tree

#: Queries, keys, values and a mask, None for causal, to outputs [1, Q, N, D].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class TreeMasks(NamedTuple):
    """How the trees of an unpadded row attend."""

    trees: tuple[tuple[Tree, torch.Tensor | None], ...]
    """Each tree and its mask [1, 1, S, S], or None where the model's own rule is plainly causal."""
    tail_masks: dict[Tail, torch.Tensor]
    """The masks [1, 1, T, K] of the tails after the first of trees without a mask: their paths, then themselves."""

    @classmethod
    def of(cls, trees: Sequence[tuple[Tree, torch.Tensor | None]], device: torch.device) -> "TreeMasks":
        """Add the masks of tails."""
        tails = {tail for tree, mask in trees if mask is None for tail in tree.tails[1:]}
        return cls(tuple(trees), {tail: _tail_mask(tail, device) for tail in tails})


class TreeByTree:
    """Computes the trees of an unpadded row one at a time, as a registered attention function.

    Args:
        plain: The attention function for ordinary batches and masks.
    """

    def __init__(self, plain: Callable[..., tuple[torch.Tensor, Any]]) -> None:
        self.plain = plain

    def __call__(
        self,
        module: nn.Module,
        query_BNLD: torch.Tensor,
        key_BNLD: torch.Tensor,
        value_BNLD: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        def attend(*tensors: torch.Tensor | None) -> torch.Tensor:
            return self.plain(module, *tensors, *args, **kwargs)[0]

        if not isinstance(attention_mask, TreeMasks):
            return self.plain(module, query_BNLD, key_BNLD, value_BNLD, attention_mask, *args, **kwargs)
        outputs: list[torch.Tensor] = []
        # cut at once: the backward of slices would write a row of zeros for each
        sizes = [tree.stop - tree.start for tree, _ in attention_mask.trees]
        parts = (tensor.split(sizes, dim=2) for tensor in (query_BNLD, key_BNLD, value_BNLD))
        for (tree, mask), query, key, value in zip(attention_mask.trees, *parts, strict=True):
            if mask is not None:
                outputs.append(attend(query, key, value, mask))
            else:
                outputs += _tail_by_tail(attend, query, key, value, tree, attention_mask.tail_masks)
        return torch.cat(outputs, dim=1), None


def _tail_by_tail(
    attend: Attend,
    query_1NSD: torch.Tensor,
    key_1NSD: torch.Tensor,
    value_1NSD: torch.Tensor,
    tree: Tree,
    masks: dict[Tail, torch.Tensor],
) -> Iterator[torch.Tensor]:
    sizes = [tail.stop - tail.start for tail in tree.tails]
    parts = (states.split(sizes, dim=2) for states in (query_1NSD, key_1NSD, value_1NSD))
    for tail, *states in zip(tree.tails, *parts, strict=True):
        query, key, value = states
        if tail.path:
            before = [[x[:, :, start:stop] for start, stop in tail.path] for x in (key_1NSD, value_1NSD)]
            key, value = torch.cat([*before[0], key], dim=2), torch.cat([*before[1], value], dim=2)
        yield attend(query, key, value, masks.get(tail))


def _tail_mask(tail: Tail, device: torch.device) -> torch.Tensor:
    before, own = sum(stop - start for start, stop in tail.path), tail.stop - tail.start
    return torch.ones(own, before + own, dtype=torch.bool, device=device).tril(before)[None, None]
