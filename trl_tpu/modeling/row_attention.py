"""Attention over packed rows: objects that stand in place of a layer's mask, and attend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers.masking_utils import causal_mask_function

from ..packing.batch import Batch, Tail, Tree
from ..packing.shapes import round_up

#: transformers' type of mask: a function of indices, ``(batch, head, query, key) -> bool``.
MaskRule: TypeAlias = Callable[..., Any]
#: one of transformers' mask functions: it makes a mask from a rule
Masks: TypeAlias = Callable[..., Any]
#: outputs [B, L, N, D] of attention, and its weights or None
Outputs: TypeAlias = tuple[torch.Tensor, Any]
#: one of transformers' attention functions
Attention: TypeAlias = Callable[..., Outputs]


def tree_rule(subtree_end_RL: Any, position_ids_RL: Any, rule: MaskRule = causal_mask_function) -> MaskRule:
    """Turn a model's mask rule over positions in one sequence into a rule over columns of packed rows."""

    def on_path(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        path = (key <= query) & (query < subtree_end_RL[row, key])
        return path & rule(row, head, position_ids_RL[row, query], position_ids_RL[row, key])

    return on_path


class RowAttention:
    """Attention over packed rows. A model passes it from its mask function to its layers, as it would pass a mask."""

    def attend(self, plain: Attention, module: nn.Module, *states_BNLD: Any, **kwargs: Any) -> Outputs:
        """Attend as one of transformers' attention functions.

        Args:
            plain: The model's attention function over mask tensors.
            module: The attention layer.
            states_BNLD: Queries, keys and values of B rows, N heads, L columns and D numbers.
            **kwargs: Further arguments of ``plain``.

        Returns:
            Outputs [B, L, N, D] and no attention weights.
        """
        raise NotImplementedError

    def __getitem__(self, part: Any) -> "RowAttention":
        """Return all of it: models such as Gemma 4 slice masks to the keys of a cache, and training has no cache."""
        return self


def attend_in_rows(
    plain: Attention, module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Outputs:
    """Attend as a `RowAttention` does, or with a mask tensor as ``plain`` does."""
    if isinstance(attention_mask, RowAttention):
        return attention_mask.attend(plain, module, query, key, value, **kwargs)
    return plain(module, query, key, value, attention_mask, **kwargs)


@dataclass(frozen=True, eq=False)
class TreeByTree(RowAttention):
    """Attention in an unpadded row, one tree at a time: the least work, in many small operations.

    In a tree without a mask, attention is computed tail by tail. The keys of a tail's path come before its own keys.

    Attributes:
        trees: Each tree with its mask [1, 1, S, S]; None if the model's rule is plain causal attention.
        tail_masks: Additive masks [1, 1, T, K] of later tails in trees without a mask: T tail tokens, K keys of path
            and tail.
    """

    trees: tuple[tuple[Tree, torch.Tensor | None], ...]
    tail_masks: dict[Tail, torch.Tensor]

    @classmethod
    def of(cls, plain: Masks, batch: Batch[Any], rule: MaskRule, *args: Any, **kwargs: Any) -> "TreeByTree":
        """Build the masks of a batch's trees by a model's mask function ``plain`` from its ``rule``."""
        in_trees = tree_rule(batch.subtree_end_RL, batch.position_ids_RL, rule)
        masks, tail_masks = [], dict[Tail, torch.Tensor]()
        for tree in batch.trees or ():
            length = tree.stop - tree.start
            alone = {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0, "attention_mask": None}
            mask = plain(*args, **kwargs | alone)
            if mask is not None and len(tree.tails) > 1:
                branched = {"mask_function": in_trees, "allow_is_causal_skip": False, "q_offset": tree.start}
                mask = plain(*args, **kwargs | alone | branched | {"kv_offset": tree.start})
            masks.append((tree, mask))
            for tail in tree.tails[1:] if mask is None else ():
                before, size = sum(stop - start for start, stop in tail.path), tail.stop - tail.start
                # additive: sdpa would convert a boolean mask in each layer
                hidden = batch.input_ids_RL.new_full((1, 1, size, before + size), -torch.inf, dtype=kwargs["dtype"])
                tail_masks[tail] = hidden.triu(before + 1)
        return cls(tuple(masks), tail_masks)

    def attend(self, plain: Attention, module: nn.Module, *states_BNLD: Any, **kwargs: Any) -> Outputs:
        outputs: list[torch.Tensor] = []
        # One split of the whole row: the backward of separate slices would write a row of zeros per slice.
        sizes = [tree.stop - tree.start for tree, _ in self.trees]
        trees = (state.split(sizes, dim=2) for state in states_BNLD)
        for (tree, mask), *states in zip(self.trees, *trees, strict=True):
            if mask is not None:
                outputs.append(plain(module, *states, mask, **kwargs)[0])
                continue
            sizes = [tail.stop - tail.start for tail in tree.tails]
            tails = (state.split(sizes, dim=2) for state in states)
            for tail, query, key, value in zip(tree.tails, *tails, strict=True):
                if tail.path:
                    before = [[state[:, :, start:stop] for start, stop in tail.path] for state in states[1:]]
                    key, value = torch.cat([*before[0], key], dim=2), torch.cat([*before[1], value], dim=2)
                outputs.append(plain(module, query, key, value, self.tail_masks.get(tail), **kwargs)[0])
        return torch.cat(outputs, dim=1), None


@dataclass(frozen=True, eq=False)
class JointTrees(RowAttention):
    """Attention in all trees of an unpadded row at once, as T rows of L columns with one mask: few operations.

    Attributes:
        column_TL: Column of each token in the unpadded row; an arbitrary column for padding.
        place_S: Place of each of the unpadded row's S tokens in the flattened T rows.
        mask: The mask [T, 1, L, L].
    """

    column_TL: torch.Tensor
    place_S: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, plain: Masks, batch: Batch[Any], rule: MaskRule, *args: Any, **kwargs: Any) -> "JointTrees":
        """Build the mask of a batch's trees by a model's mask function ``plain`` from its ``rule``."""

        def rule_of_only_row(row: torch.Tensor, *indices: torch.Tensor) -> Any:
            return rule(torch.zeros_like(row), *indices)  # the model knows of one row

        end_RL: Any = batch.subtree_end_RL
        position_RL: Any = batch.position_ids_RL
        sizes = [tree.stop - tree.start for tree in batch.trees or ()]
        size_T = torch.tensor(sizes, device=end_RL.device)
        rows, start_T = len(sizes), size_T.cumsum(0) - size_T
        length = round_up(max(sizes), 8)  # kernels copy masks of other lengths
        column_L, column_S = (torch.arange(count, device=end_RL.device) for count in (length, end_RL.shape[1]))
        column_TL = (start_T[:, None] + column_L).clamp(max=len(column_S) - 1)
        # padding attends to itself, since attention to nothing could give NaN
        end_TL = torch.where(column_L < size_T[:, None], end_RL[0, column_TL] - start_T[:, None], column_L + 1)
        in_rows = {"batch_size": rows, "q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0}
        in_rows |= {"attention_mask": None, "allow_is_causal_skip": False}
        in_rows |= {"mask_function": tree_rule(end_TL, position_RL[0, column_TL], rule_of_only_row)}
        row_S = torch.arange(rows, device=end_RL.device).repeat_interleave(size_T, output_size=len(column_S))
        return cls(column_TL, column_S + (row_S * length - start_T[row_S]), plain(*args, **kwargs | in_rows))

    def attend(self, plain: Attention, module: nn.Module, *states_BNLD: Any, **kwargs: Any) -> Outputs:
        column_M, shape = self.column_TL.flatten(), self.column_TL.shape
        rows = (state[0].index_select(1, column_M).unflatten(1, shape).transpose(0, 1) for state in states_BNLD)
        output_TLND = plain(module, *rows, self.mask, **kwargs)[0]
        return output_TLND.flatten(0, 1).index_select(0, self.place_S)[None], None
