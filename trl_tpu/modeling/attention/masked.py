"""Attention over packed rows, and the rewards of the dialogues in them.

A packed row (see `trl_tpu.packing.pack`) needs its own attention mask and nothing else from a model. transformers'
decoders build their masks through one interface: they call the mask function registered for their attention
implementation with a rule ``(batch, head, query, key) -> bool`` that says causal, sliding or chunked, layer by layer.
Here that function is given one more ability: while packed rows are read, the rule is asked about positions in the
dialogues, and the tree decides who is on whose path.
So a sliding window counts a dialogue's tokens, each layer keeps its own rule, and whatever takes a mask for each query
and key works: eager attention, sdpa and what is built on them. In a tight row (`TightRow`) attention is computed tree
by tree, so that its cost is that of the trees and not of the row.

Letters: P pairs, R rows, L length of a row, H hidden.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...packing.trie import Tree
from ..rewards import find_score_head
from .expanded_rows import ExpandedRows
from .last_layer import scored_only
from .tree_by_tree import TreeByTree, TreeMasks


def tree_rule(
    layout_R2L: torch.Tensor, rule: Callable[..., Any] = causal_mask_function
) -> Callable[..., torch.Tensor]:
    """A model's own mask rule, as it holds in the dialogues of packed rows.

    Args:
        layout_R2L: Subtree ends and position ids of each row, stacked.
        rule: The rule for one dialogue a row, by positions.
    """
    subtree_end_RL, position_RL = layout_R2L.unbind(1)

    def on_path(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        path = (key <= query) & (query < subtree_end_RL[row, key])
        return path & rule(row, head, position_RL[row, query], position_RL[row, key])

    return on_path


@dataclass(frozen=True)
class RowLayout:
    """What a mask must know of packed rows.

    Args:
        layout_R2L: Subtree ends and position ids of each row, stacked.
        trees: The trees of a tight row; None to mask whole rows.
        scored: Of a tight row, the columns of the tokens that are scored, ascending; None to compute all of them.
        expanded: Where the tokens lie in rows of whole dialogues, for models that attend there.
        asked: The rules that a model has asked for masks of: none, if it makes its masks by itself.
    """

    layout_R2L: torch.Tensor
    trees: tuple[Tree, ...] | None = None
    scored: tuple[int, ...] | None = None
    expanded: ExpandedRows | None = None
    asked: list[str] = field(default_factory=list)


class TreeMask:
    """A registered mask function that, while `reading` packed rows, builds their masks.

    Args:
        plain: The mask function for ordinary batches.
    """

    layout: ContextVar[RowLayout | None] = ContextVar("layout", default=None)

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (layout := self.layout.get()) is None:
            return self.plain(*args, **kwargs)
        rule = kwargs.get("mask_function", causal_mask_function)
        layout.asked.append(getattr(rule, "__name__", "rule"))
        return self.masks_of(layout, rule, *args, **kwargs)

    def masks_of(self, layout: RowLayout, rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The masks of packed rows by a model's own rule, in the form that its attention function takes."""
        tree_wise = kwargs | {"mask_function": tree_rule(layout.layout_R2L, rule), "attention_mask": None}
        tree_wise["allow_is_causal_skip"] = False
        if layout.trees is None:
            return self.plain(*args, **tree_wise)
        masks = []
        for tree in layout.trees:
            length = tree.stop - tree.start
            alone = {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0, "attention_mask": None}
            mask = self.plain(*args, **kwargs | alone)
            if mask is not None and len(tree.tails) > 1:
                mask = self.plain(*args, **tree_wise | alone | {"q_offset": tree.start, "kv_offset": tree.start})
            masks.append((tree, mask))
        return TreeMasks.of(masks, layout.layout_R2L[0, 0])

    @classmethod
    @contextmanager
    def reading(cls, layout: RowLayout) -> Iterator[None]:
        """Packed rows are read."""
        token = cls.layout.set(layout)
        try:
            yield
        finally:
            cls.layout.reset(token)


def use_tree_masks(model: PreTrainedModel) -> None:
    """Let ``model``, and every model with the same attention implementation, build masks for packed rows.

    Call it once the implementation is final. Ordinary batches get the same masks as before.

    Raises:
        ValueError: If the implementation takes no mask for each query and key, as flash and flex attention.
    """
    name = model.config._attn_implementation
    plain = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if plain is None or name.startswith(("flash", "flex")):
        raise ValueError(
            f"Packed rows need attention that takes a mask, but the model uses {name!r}. Load it with "
            "`attn_implementation=` 'sdpa' or 'eager'."
        )
    if not isinstance(plain, TreeMask):
        AttentionMaskInterface.register(name, TreeMask(plain))
    attention = ALL_ATTENTION_FUNCTIONS.get(name)
    if attention is not None and not isinstance(attention, TreeByTree):
        AttentionInterface.register(name, TreeByTree(attention))


def goes_tree_by_tree(model: PreTrainedModel) -> bool:
    """Whether the model's attention takes tight rows: after `use_tree_masks`, any but a model's own eager one."""
    return isinstance(ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation), TreeByTree)


def packed_rewards(
    model: nn.Module,
    input_ids_RL: torch.Tensor,
    position_ids_RL: torch.Tensor,
    subtree_end_RL: torch.Tensor,
    last_row_P2: torch.Tensor,
    last_column_P2: torch.Tensor,
    trees: tuple[Tree, ...] | None = None,
    scored: tuple[int, ...] | None = None,
    expanded: ExpandedRows | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The rewards of a packed batch, [P, 2] in float32 or wider, equal to those of the padded forward.

    The model is called as a whole, so whatever wraps it (LoRA, data parallelism, autocast) takes part.

    Args:
        model: A decoder with a `score` head over its hidden states, as transformers' sequence classifiers, after
            `use_tree_masks`.
        input_ids_RL, position_ids_RL, subtree_end_RL, last_row_P2, last_column_P2: See `PackedPass`.
        trees: The trees of a tight row.
        scored: The columns of its scored tokens, ascending.
        expanded: Where the tokens lie in expanded rows; used after `use_expanded_attention`.
        kwargs: Handed on to the model.

    Raises:
        ValueError: If the model has no `score` head, or did not ask for a mask.
    """
    layout = RowLayout(torch.stack([subtree_end_RL, position_ids_RL], dim=1), trees, scored, expanded)
    head, hidden_RLH = packed_states(model, input_ids_RL, position_ids_RL, layout, **kwargs)
    return score_wide(head, hidden_RLH[last_row_P2, last_column_P2])


def packed_states(
    model: nn.Module, input_ids_RL: torch.Tensor, position_ids_RL: torch.Tensor, layout: RowLayout, **kwargs: Any
) -> tuple[nn.Module, torch.Tensor]:
    """The score head of ``model``, and the hidden states [R, L, H] that it is given.

    Raises:
        ValueError: If the model has no `score` head, or did not ask for a mask.
    """
    head = find_score_head(model)
    if head is None:
        raise ValueError(f"{type(model).__name__} has no `score` head whose rewards could be read from packed rows.")
    seen: list[torch.Tensor] = []
    watch = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    # A mask without padding: models that found none would search the positions for sequences, and stop the device.
    everything = {"attention_mask": torch.ones_like(input_ids_RL), "position_ids": position_ids_RL}
    scored = layout.scored
    last_layer = nullcontext() if scored is None else scored_only(model, scored, input_ids_RL.shape[1])
    try:
        with TreeMask.reading(layout), last_layer:
            # the scores that the model itself picks, one a row, mean nothing here
            model(input_ids=input_ids_RL, **everything, **kwargs)
    finally:
        watch.remove()
    if not layout.asked:
        raise ValueError(
            f"{type(model).__name__} did not ask for the masks of packed rows: it makes its own, or `use_tree_masks` "
            "was not called with its attention implementation. Train it on padded rows."
        )
    return head, seen[0]


def score_wide(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The rewards [...] of hidden states [..., H], computed in float32 or, where either has it, in float64."""
    parameters = dict(head.named_parameters())
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    for parameter in parameters.values():
        dtype = torch.promote_types(dtype, parameter.dtype)
    wide = {name: parameter.to(dtype) for name, parameter in parameters.items()}
    with torch.autocast(hidden.device.type, enabled=False):
        return functional_call(head, wide, (hidden.to(dtype),)).squeeze(-1)
