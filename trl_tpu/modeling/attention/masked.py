"""Computes the rewards of the dialogues in packed rows, and the masks for attention over them.

A packed row (see `trl_tpu.packing.pack`) needs its own attention mask and nothing else from a model. transformers'
decoders build their masks through one interface: they call the mask function registered for their attention
implementation with a rule ``(batch, head, query, key) -> bool`` that says causal, sliding or chunked, layer by layer.
Here that function is given one more ability: while packed rows are read, the rule is asked about positions in the
dialogues, and the tree decides who is on whose path.
So a sliding window counts a dialogue's tokens, each layer keeps its own rule, and whatever takes a mask for each query
and key works: eager attention, sdpa and what is built on them. In an `UnpaddedRow` attention is computed tree
by tree, so that its cost is that of the trees and not of the row.

Letters: P pairs, R rows, L length of a row, H hidden.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...errors import UserError
from ...packing.rows import PackedRows
from ..score_head import find_score_head, score_wide
from .tree_by_tree import TreeByTree, TreeMasks

#: ``(batch, head, query, key) -> bool``, of indices in transformers' own use.
MaskRule = Callable[..., Any]


def tree_rule(
    subtree_end_RL: torch.Tensor, position_ids_RL: torch.Tensor, rule: MaskRule = causal_mask_function
) -> MaskRule:
    """Turn a model's own mask rule for one dialogue a row, by positions, into that for packed rows, by columns."""

    def on_path(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        path = (key <= query) & (query < subtree_end_RL[row, key])
        return path & rule(row, head, position_ids_RL[row, query], position_ids_RL[row, key])

    return on_path


@dataclass(frozen=True)
class Reading:
    """Packed rows while a model reads them, and the rules that it has asked for masks of."""

    rows: PackedRows[torch.Tensor]
    rules: list[MaskRule] = field(default_factory=list)


_READING: ContextVar[Reading | None] = ContextVar("reading", default=None)


class TreeMask:
    """Builds the masks of packed rows while they are read, as a registered mask function.

    Args:
        plain: The mask function for ordinary batches.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (reading := _READING.get()) is None:
            return self.plain(*args, **kwargs)
        rule = kwargs.get("mask_function", causal_mask_function)
        reading.rules.append(rule)
        return self.masks_of(reading.rows, rule, *args, **kwargs)

    def masks_of(self, rows: PackedRows[torch.Tensor], rule: MaskRule, *args: Any, **kwargs: Any) -> Any:
        """Build the masks of packed rows by a model's own rule, in the form that its attention function takes."""
        in_trees = tree_rule(rows.subtree_end_RL, rows.position_ids_RL, rule)
        tree_wise = kwargs | {"mask_function": in_trees, "attention_mask": None, "allow_is_causal_skip": False}
        if rows.trees is None:
            return self.plain(*args, **tree_wise)
        masks = []
        for tree in rows.trees:
            length = tree.stop - tree.start
            alone = {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0, "attention_mask": None}
            mask = self.plain(*args, **kwargs | alone)
            if mask is not None and len(tree.tails) > 1:
                mask = self.plain(*args, **tree_wise | alone | {"q_offset": tree.start, "kv_offset": tree.start})
            masks.append((tree, mask))
        return TreeMasks.of(masks, rows.input_ids_RL.device)


def use_tree_masks(model: PreTrainedModel) -> None:
    """Let ``model``, and every model with the same attention implementation, build masks for packed rows.

    Call it once the implementation is final. Ordinary batches get the same masks as before.

    Raises:
        UserError: If the implementation takes no mask for each query and key, as flash and flex attention.
    """
    name = model.config._attn_implementation
    plain = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if plain is None or name.startswith(("flash", "flex")):
        raise UserError(
            f"Packed rows need attention that takes a mask, but the model uses {name!r}. Load it with "
            "`attn_implementation=` 'sdpa' or 'eager'."
        )
    if not isinstance(plain, TreeMask):
        AttentionMaskInterface.register(name, TreeMask(plain))
    attention = ALL_ATTENTION_FUNCTIONS.get(name)
    if attention is not None and not isinstance(attention, TreeByTree):
        AttentionInterface.register(name, TreeByTree(attention))


def goes_tree_by_tree(model: PreTrainedModel) -> bool:
    """Tell whether the model's attention takes tight rows: after `use_tree_masks`, any but a model's own eager one."""
    return isinstance(ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation), TreeByTree)


def packed_rewards(model: nn.Module, rows: PackedRows[torch.Tensor], **kwargs: Any) -> torch.Tensor:
    """Compute the rewards of packed rows, in float32 or wider, equal to those of the padded forward.

    The model is called as a whole, so whatever wraps it (LoRA, data parallelism, autocast) takes part.

    Args:
        model: A decoder with a `score` head over its hidden states, as transformers' sequence classifiers, after
            `use_tree_masks`.
        rows: Their expansion is used after `use_expanded_attention`.
        kwargs: Handed on to the model.

    Returns:
        A reward for each last token of the rows, [P, 2].

    Raises:
        UserError: If the model has no `score` head, or did not ask for a mask.
    """
    states, _ = scored_states(model, rows, **kwargs)
    return score_wide(_score_head(model), states)


def scored_states(
    model: nn.Module, rows: PackedRows[torch.Tensor], **kwargs: Any
) -> tuple[torch.Tensor, list[MaskRule]]:
    """Compute the hidden states that the rewards are read from, [P, 2, H]; also the mask rules asked for.

    Raises:
        UserError: If the model has no `score` head, or did not ask for a mask.
    """
    reading, seen = Reading(rows), list[torch.Tensor]()
    watch = _score_head(model).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    # A mask without padding: models that found none would search the positions for sequences, and stop the device.
    everything = {"attention_mask": torch.ones_like(rows.input_ids_RL), "position_ids": rows.position_ids_RL}
    outside = _READING.set(reading)
    try:
        # the scores that the model itself picks, one a row, mean nothing here
        model(input_ids=rows.input_ids_RL, **everything, **kwargs)
    finally:
        _READING.reset(outside)
        watch.remove()
    if not reading.rules:
        raise UserError(
            f"{type(model).__name__} did not ask for the masks of packed rows: it makes its own, or `use_tree_masks` "
            "was not called with its attention implementation. Train it on padded rows."
        )
    return seen[0][rows.last], reading.rules


def _score_head(model: nn.Module) -> nn.Module:
    head = find_score_head(model)
    if head is None:
        raise UserError(f"{type(model).__name__} has no `score` head whose rewards could be read from packed rows.")
    return head
