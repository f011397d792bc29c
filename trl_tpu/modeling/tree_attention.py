"""Attention over packed rows, and the rewards of the dialogues in them.

A packed row (see `trl_tpu.data.packing`) needs its own attention mask and nothing else from a model. transformers'
decoders build their masks through one interface: they call the mask function registered for their attention
implementation with a rule ``(batch, head, query, key) -> bool`` that says causal, sliding or chunked, layer by layer.
Here that function is given one more ability: while packed rows are read, the rule is asked about positions in the
dialogues, and the tree decides who is on whose path.
So a sliding window counts a dialogue's tokens, each layer keeps its own rule, and whatever takes a mask for each query
and key works: eager attention, sdpa and what is built on them.

Letters: P pairs, R rows, L length of a row, H hidden.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from ..data.collators import DataCollatorForPreference, PackedRows
from ..data.row_shapes import RowShape
from .rewards import PairBatch, find_score_head


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


class TreeMask:
    """A registered mask function that, while `reading` a layout, builds the masks of packed rows.

    Args:
        plain: The mask function for ordinary batches.
    """

    layout: ContextVar[tuple[torch.Tensor, list[str]] | None] = ContextVar("layout", default=None)

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (current := self.layout.get()) is None:
            return self.plain(*args, **kwargs)
        layout_R2L, asked = current
        rule = kwargs.get("mask_function", causal_mask_function)
        asked.append(getattr(rule, "__name__", "rule"))
        ours = {"mask_function": tree_rule(layout_R2L, rule), "attention_mask": None, "allow_is_causal_skip": False}
        return self.plain(*args, **(kwargs | ours))

    @classmethod
    @contextmanager
    def reading(cls, layout_R2L: torch.Tensor) -> Iterator[list[str]]:
        """Yields the rules that a model has asked for masks of: none, if it makes its masks by itself."""
        asked: list[str] = []
        token = cls.layout.set((layout_R2L, asked))
        try:
            yield asked
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


@dataclass(frozen=True)
class PackedPairs:
    """P pairs in packed rows (see `trl_tpu.data.packing.PackedBatch`), on the device."""

    layout: Mapping[str, torch.Tensor]
    tokens_P: torch.Tensor
    margin_P: torch.Tensor | None
    mask_P: torch.Tensor

    @classmethod
    def read(cls, inputs: Mapping[str, Any]) -> "PackedPairs":
        """Read a batch of `trl_tpu.data.collators.PackedRows`."""
        layout = {f"{name}_RL": inputs[name] for name in ("input_ids", "position_ids", "subtree_end")}
        layout |= {f"{name}_P2": inputs[name] for name in ("last_row", "last_column")}
        return cls(layout, inputs["tokens"], inputs.get("margin"), inputs["pair_mask"])

    def rewards(self, model: nn.Module, **extras: Any) -> tuple[torch.Tensor, Any]:
        """The rewards [P, 2], and in the place of a model's outputs the two halves of them."""
        rewards_P2 = packed_rewards(model, **self.layout, **extras)
        return rewards_P2, {"rewards_chosen": rewards_P2[:, 0], "rewards_rejected": rewards_P2[:, 1]}

    @property
    def tokens(self) -> torch.Tensor:
        """How many tokens the dialogues of the real pairs have, as if nothing were shared: an int32 scalar."""
        return self.tokens_P.sum(dtype=torch.int32)


def packed_rewards(
    model: nn.Module,
    input_ids_RL: torch.Tensor,
    position_ids_RL: torch.Tensor,
    subtree_end_RL: torch.Tensor,
    last_row_P2: torch.Tensor,
    last_column_P2: torch.Tensor,
    **kwargs: Any,
) -> torch.Tensor:
    """The rewards of a packed batch, [P, 2] in float32 or wider, equal to those of the padded forward.

    The model is called as a whole, so whatever wraps it (LoRA, data parallelism, autocast) takes part.

    Args:
        model: A decoder with a `score` head over its hidden states, as transformers' sequence classifiers, after
            `use_tree_masks`.
        input_ids_RL, position_ids_RL, subtree_end_RL, last_row_P2, last_column_P2: See `PackedBatch`.
        kwargs: Handed on to the model.

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
    try:
        with TreeMask.reading(torch.stack([subtree_end_RL, position_ids_RL], dim=1)) as asked:
            # the scores that the model itself picks, one a row, mean nothing here
            model(input_ids=input_ids_RL, **everything, **kwargs)
    finally:
        watch.remove()
    if not asked:
        raise ValueError(
            f"{type(model).__name__} did not ask for the masks of packed rows: it makes its own, or `use_tree_masks` "
            "was not called with its attention implementation. Train it on padded rows."
        )
    (hidden_RLH,) = seen
    return score_wide(head, hidden_RLH[last_row_P2, last_column_P2])


def score_wide(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The rewards [...] of hidden states [..., H], computed in float32 or, where either has it, in float64."""
    parameters = dict(head.named_parameters())
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    for parameter in parameters.values():
        dtype = torch.promote_types(dtype, parameter.dtype)
    wide = {name: parameter.to(dtype) for name, parameter in parameters.items()}
    with torch.autocast(hidden.device.type, enabled=False):
        return functional_call(head, wide, (hidden.to(dtype),)).squeeze(-1)


@torch.no_grad()
def check_packing_is_exact(model: nn.Module, pad_token_id: int) -> None:
    """Compare the rewards of two small pairs in packed rows with those of padded rows, on the model as it is.

    Some models take a mask and yet read positions from elsewhere (ALiBi), or let padding or order leak in otherwise.

    Raises:
        ValueError: If the rewards differ by more than the model's precision explains, or packed rows cannot be read.
    """
    ids = [token for token in range(40) if token != pad_token_id]
    chosen, rejected = [ids[:9], ids[20:24]], [[*ids[:5], *ids[10:14]], [*ids[20:22], *ids[30:33]]]
    packed = PackedRows((RowShape(1, 32),), pairs=2, pad_token_id=pad_token_id)
    padded = DataCollatorForPreference(pad_token_id)
    examples = [{"chosen_ids": one, "rejected_ids": other} for one, other in zip(chosen, rejected, strict=True)]
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        rows = {name: tensor.to(device) for name, tensor in packed(examples).items()}
        packed_P2, _ = PackedPairs.read(rows).rewards(model)
        batch = PairBatch.read(
            {key: value.to(device) for key, value in padded(examples).items()}, pad_token_id, "right"
        )
        padded_P2, _ = batch.rewards(model)
    finally:
        model.train(was_training)
    dtype = next(model.parameters()).dtype
    allowed = 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2
    difference = (packed_P2.float() - padded_P2).abs().max()
    if not difference <= allowed * padded_P2.abs().max().clamp(min=1):
        raise ValueError(
            f"packing=True is not exact for {type(model).__name__}: packed and padded rewards of the same pairs "
            f"differ by {difference:.2g}, where {dtype} explains {allowed:.0e}. Its attention or positions do not "
            "follow the mask and position ids they are given. Leave packing out for this model."
        )
