"""Attends over packed rows by kernels that know rows of whole dialogues: no mask of a row's length squared.

The other way to attend in packed rows (see `masked`) is a mask for each query and key, which long rows cannot
afford. Here, inside the attention function only, queries, keys and values move to rows of whole dialogues (see
`trl_tpu.packing.expand`), the runtime's kernel attends there within segments, and the outputs move back; the linear
layers still compute each shared token once.

transformers asks for masks layer by layer, with a rule ``(batch, head, query, key) -> bool``. A rule that is causal,
with or without a sliding window, is all a kernel need know, so that goes to the layers in the place of a mask, and the
places of the tokens with it. Any other rule is refused.

Letters: B rows, R packed rows, H heads, L length, D size of a head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ... import runtime
from ...errors import UserError
from ...packing.rows import TokenRows
from ...parallel.mesh import BATCH_AXES
from ...runtime import PartitionSpec
from ...runtime.kernels.plain import masked_attention
from .expanded_rows import ExpandedRows
from .masked import MaskRule, TreeMask, attend_by
from .static import static_sdpa_attention, static_sdpa_mask

_HEADS = "tensor"  # the mesh axis that heads go over
_KERNEL_LAYERS = {"full_attention", "sliding_attention"}


class ExpansionImpossible(UserError):
    """A model's attention is more than the kernels compute; the message says what. The dense way may still do."""


@dataclass(frozen=True)
class ExpandedMask:
    """What a layer must know to attend in expanded rows, in the place of a mask.

    Args:
        rows: Where the tokens lie.
        window: How many tokens of its dialogue a token sees, itself among them; None for all.
    """

    rows: ExpandedRows
    window: int | None


class ExpandedTreeMask(TreeMask):
    """Builds no masks, as a registered mask function, where packed rows come with their expansion."""

    def masks_of(self, rows: TokenRows[torch.Tensor], rule: MaskRule, *args: Any, **kwargs: Any) -> Any:
        if rows.expansion is None:
            return super().masks_of(rows, rule, *args, **kwargs)
        if kwargs.get("use_vmap"):
            raise ExpansionImpossible("A layer's mask is the model's own rule, which attention kernels do not know.")
        return ExpandedMask(ExpandedRows(*rows.expansion), window_of(rule, rows.input_ids_RL.shape[1]))


def window_of(rule: MaskRule, length: int) -> int | None:
    """Return the sliding window of a causal mask rule, None if it has none that shows in ``length`` columns.

    Raises:
        ExpansionImpossible: If the rule is not causal, or anything but causal with a sliding window.
    """
    nothing, keys = torch.zeros(1, 1, dtype=torch.long), torch.arange(length)

    def seen(queries: list[int]) -> torch.Tensor:
        found = rule(nothing, nothing, torch.tensor(queries)[:, None], keys[None, :])
        return torch.as_tensor(found).broadcast_to(len(queries), length)

    window = int(seen([length - 1]).sum())
    # where rules of indices differ, they do at the ends, or where a window or a chunk is first full
    queries = sorted({0, length // 2, length - 1, *range(max(window - 2, 0), min(window + 2, length))})
    query_Q1 = torch.tensor(queries)[:, None]
    if not torch.equal(seen(queries), (keys <= query_Q1) & (keys > query_Q1 - window)):
        raise ExpansionImpossible(
            "A layer's mask is neither causal nor a causal sliding window, but in chunks or in both directions, which "
            "attention kernels do not know."
        )
    return None if window == length else window


def expanded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention functions do: packed rows through their expansion, any other batch as sdpa.

    Raises:
        ExpansionImpossible: For dropout, and for what this way cannot compute: attention sinks, position biases, a
            layer that looks both ways.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings leave them in float32 under autocast
    if softcap is None and not isinstance(attention_mask, ExpandedMask):
        rest = {"dropout": dropout, "scaling": scale, **kwargs}
        return static_sdpa_attention(module, query, key, value, attention_mask, **rest)
    obstacles = {
        "attention dropout is not 0": dropout > 0,
        "it looks both ways": kwargs.get("is_causal", getattr(module, "is_causal", True)) is False,
        "it has attention sinks": kwargs.get("s_aux") is not None,
        "it adds biases by position": kwargs.get("position_bias") is not None,
    }
    _refuse(module, obstacles)
    if not isinstance(attention_mask, ExpandedMask):
        return masked_attention(query, key, value, attention_mask, scale, softcap).transpose(1, 2).contiguous(), None

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
        rows = ExpandedRows(*places)
        moved = rows.queries(query), rows.copies(key), rows.copies(value), rows.segment_R2L.flatten(0, 1)
        return rows.outputs(runtime.current().segment_attention(*moved, scale, attention_mask.window, softcap))

    # rows are independent: left to itself, the compiler would fetch every row to every device to gather from
    tensors = (query, key, value, *attention_mask.rows)
    axes: list[PartitionSpec] = [(BATCH_AXES, _HEADS, None, None)] * 3
    axes += [(BATCH_AXES, *(None,) * (place.dim() - 1)) for place in attention_mask.rows]
    return runtime.current().shard_map(attend, tensors, axes, (BATCH_AXES, None, _HEADS, None)), None


def _refuse(module: nn.Module, obstacles: dict[str, bool]) -> None:
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise ExpansionImpossible(f"{type(module).__name__} cannot attend in expanded rows: {obstacle}.")


def use_expanded_attention(model: PreTrainedModel) -> None:
    """Let ``model`` attend in expanded rows where a packed batch has its expansion.

    Any other batch, packed or not, is attended to with masks, as by sdpa.

    Raises:
        ExpansionImpossible: If the model's own code attends, or its config asks for what kernels do not know. What a
            config does not show, the first forward refuses.
    """
    config: Any = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - _KERNEL_LAYERS
    obstacles = {
        f"it has layers of {', '.join(sorted(map(str, others)))}": bool(others),
        "its attention dropout is not 0": bool(getattr(config, "attention_dropout", 0)),
        "it has attention sinks": any(name.endswith(".sinks") for name, _ in model.named_parameters()),
    }
    _refuse(model, obstacles)
    attend_by(model, "expanded", ExpandedTreeMask(static_sdpa_mask), expanded_attention)
