"""Computes the rewards of the dialogues in packed rows, and the masks for attention over them.

A packed row (see `trl_tpu.packing.pack`) needs its own attention mask and nothing else from a model. transformers'
decoders build their masks through one interface: they call the mask function registered for their attention
implementation with a rule ``(batch, head, query, key) -> bool`` that says causal, sliding or chunked, layer by layer.
Here a model's implementation is registered once more under a name of ours, with one more ability: while packed rows
are read, the rule is asked about positions in the dialogues, and the tree decides who is on whose path. The model's
config names it, so other models in the process know nothing of it.
So a sliding window counts a dialogue's tokens, each layer keeps its own rule, and whatever takes a mask for each query
and key works: eager attention, sdpa and what is built on them. In an `UnpaddedRow` attention is computed tree
by tree, so that its cost is that of the trees and not of the row.

Letters: P pairs, R rows, L length of a row, H hidden.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import CompileableContextVar

from ...errors import UserError
from ...packing.rows import TokenRows
from ..score_head import score_head_of
from .tree_by_tree import TreeByTree, TreeMasks
from .unmodified import PackingImpossible

OURS = "trl_tpu_"
"""How the names of our implementations begin in transformers' registries, and in a config's `_attn_implementation`."""

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
    """Packed rows while a model reads them, the mask rules that it has used, and what its score head returned."""

    rows: TokenRows[torch.Tensor]
    rules: list[MaskRule] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)


#: The `Reading` of this thread, if any; torch.compile cannot trace torch's own kind.
_READING = CompileableContextVar("reading")


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

    def masks_of(self, rows: TokenRows[Any], rule: MaskRule, *args: Any, **kwargs: Any) -> Any:
        """Build the masks of packed rows by a model's own rule, in the form that its attention function takes."""
        subtree_end_RL: Any = rows.subtree_end_RL
        position_ids_RL: Any = rows.position_ids_RL
        in_trees = tree_rule(subtree_end_RL, position_ids_RL, rule)
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


def attend_by(model: PreTrainedModel, name: str, masks: TreeMask, attention: Callable[..., Any]) -> None:
    """Let ``model`` attend by an implementation of ours, and no other model: its config names it.

    A saved config has no such name, so that the model loads anywhere with the default of its class. A model whose own
    code attends stays as it is, and transformers warns.
    """
    AttentionMaskInterface.register(f"{OURS}{name}", masks)
    AttentionInterface.register(f"{OURS}{name}", TreeByTree(attention))
    model.set_attn_implementation(f"{OURS}{name}")


def use_tree_masks(model: PreTrainedModel) -> None:
    """Let ``model`` build masks for packed rows, and attend in them as its attention implementation does.

    Ordinary batches get the same masks as before.

    Raises:
        PackingImpossible: If the implementation takes no mask for each query and key, as flash and flex attention, or
            the model's own code attends.
    """
    name = model.config._attn_implementation
    if name.startswith(OURS):
        return
    plain = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if plain is None or name.startswith(("flash", "flex")):
        raise PackingImpossible(
            f"packed rows need attention that takes a mask, but the model uses {name!r}. Load it with "
            "`attn_implementation=` 'sdpa' or 'eager'"
        )
    attend_by(model, name, TreeMask(plain), ALL_ATTENTION_FUNCTIONS.get(name, _eager_attention))
    if not model.config._attn_implementation.startswith(OURS):
        raise PackingImpossible(f"{type(model).__name__} does not attend through transformers' attention interface")


def _eager_attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Attend by the function that a model's module has beside it, transformers' "eager"."""
    beside = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next(own for each in beside if (own := getattr(each, "eager_attention_forward", None)))(
        module, *args, **kwargs
    )


def packed_scores(model: nn.Module, rows: TokenRows[torch.Tensor], **kwargs: Any) -> torch.Tensor:
    """Compute what the score head says of each token of packed rows, [R, L, outputs].

    The model is called as a whole, so whatever wraps it (LoRA, data parallelism, autocast) takes part.

    Args:
        model: A decoder with a `score` head over its hidden states, as transformers' classifiers, after
            `use_tree_masks`.
        rows: Their expansion is used after `use_expanded_attention`.
        kwargs: Passed on to the model.

    Raises:
        UserError: If the model has no `score` head, or did not ask for a mask.
    """
    with read_rows(model, rows, **kwargs) as reading:
        return reading.scores[0]


@contextmanager
def read_rows(model: nn.Module, rows: TokenRows[torch.Tensor], **kwargs: Any) -> Iterator[Reading]:
    """Call ``model`` with packed rows, and give what it has done.

    The rows are read until the context is closed: a program that is traced cannot ask for a reading that is over.

    Raises:
        UserError: If the model has no `score` head, or did not ask for a mask.
    """
    reading = Reading(rows)
    # A mask without padding: models that found none would search the positions for sequences, and stop the device.
    everything = {"attention_mask": torch.ones_like(rows.input_ids_RL), "position_ids": rows.position_ids_RL}
    note_scores(model)
    outside = _READING.set(reading)
    try:
        # the scores that the model itself picks, one a row, mean nothing here
        model(input_ids=rows.input_ids_RL, **everything, **kwargs)
        if not reading.rules:
            raise UserError(
                f"{type(model).__name__} did not ask for the masks of packed rows: it makes its own, or "
                "`use_tree_masks` was not called. Train it on padded rows."
            )
        yield reading
    finally:
        _READING.reset(outside)


def note_scores(model: nn.Module) -> None:
    """Let the score head of ``model`` note what it returns while packed rows are read, for as long as it lives."""
    head = score_head_of(model)
    if _note_scores not in head._forward_hooks.values():  # which is no news to a program that is traced
        head.register_forward_hook(_note_scores)


def _note_scores(_head: nn.Module, _args: tuple[torch.Tensor, ...], scores: torch.Tensor) -> None:
    if (reading := _READING.get()) is not None:
        reading.scores.append(scores)
