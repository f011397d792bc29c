"""Attention and experts with static shapes, and attention over long packed rows, for devices that compile."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .. import runtime
from ..errors import UserError
from ..packing.batch import Batch, Expansion
from ..parallel.mesh import BATCH_AXES
from ..runtime import PartitionSpec
from ..runtime.native import einsum
from .forward import MaskRule, PackedAttention, register_attention, tree_masks
from .head_spec import without_adapters, wrap_forward
from .recurrent_layers import carries_states


def static_sdpa_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Build transformers' boolean mask, and never skip it. A position that would see no key sees itself."""
    mask_BHQK = sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))
    if mask_BHQK is None or mask_BHQK.shape[-1] != mask_BHQK.shape[-2]:
        return mask_BHQK
    itself_QK = torch.eye(mask_BHQK.shape[-1], dtype=torch.bool, device=mask_BHQK.device)
    return mask_BHQK | (itself_QK & ~mask_BHQK.any(dim=-1, keepdim=True))


def static_sdpa_attention(
    module: nn.Module, query_BNQD: Any, key_BGKD: Any, value_BGKD: Any, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attend from N query heads to G key heads, [B, Q, N, D], and keep batch and heads as separate dimensions.

    torch's sdpa merges batch and heads. A merged dimension cannot be sharded over both, so each device would compute
    every head. Products use the dtype of the values, since rotary embeddings leave query and key in float32 under
    autocast. The softmax is in float32 or wider. ``kwargs`` may hold `dropout`, `scaling` and `softcap`, as in
    transformers.
    """
    query_BNQD, key_BGKD = query_BNQD.to(value_BGKD.dtype), key_BGKD.to(value_BGKD.dtype)
    if attention_mask is None or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query_BNQD, key_BGKD, value_BGKD, attention_mask, **kwargs)
    groups = key_BGKD.shape[1]
    query = query_BNQD.unflatten(1, (groups, -1))
    mask = attention_mask.unflatten(1, (groups, -1)) if attention_mask.shape[1] > 1 else attention_mask.unsqueeze(1)
    scale = scale_of(query, kwargs.get("scaling"))
    scores = einsum("bghqd,bgkd->bghqk", query * scale, key_BGKD)
    if (softcap := kwargs.get("softcap")) is not None:
        scores = (scores / softcap).tanh() * softcap
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    is_boolean = mask.dtype == torch.bool
    masked = wide.masked_fill(~mask, torch.finfo(wide.dtype).min) if is_boolean else wide + mask
    weights = F.dropout(masked.softmax(-1), kwargs.get("dropout", 0.0)).to(value_BGKD.dtype)
    outputs = einsum("bghqk,bgkd->bghqd", weights, value_BGKD)
    return outputs.flatten(1, 2).transpose(1, 2).contiguous(), None


def scale_of(query: torch.Tensor, scaling: float | None) -> float:
    """Return the factor of the scores: a layer's own, or else 1 / sqrt(D), for queries [..., D]."""
    return query.shape[-1] ** -0.5 if scaling is None else scaling


STATIC_EXPERTS = "trl_tpu_static"


def static_experts(
    experts: Any, hidden_TH: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
) -> torch.Tensor:
    """Compute every expert for every token, and return the weighted sum of each token's routed experts, [T, H].

    Args:
        experts: transformers' module with the weights of E experts.
        hidden_TH: Hidden states of the tokens.
        expert_TK: The K experts that each token is routed to.
        weight_TK: Routing weights of these experts.
    """
    inner = "gate_up_proj" if experts.has_gate else "up_proj"
    every_E = torch.arange(len(getattr(experts, inner)), device=hidden_TH.device)
    weight_TE = (weight_TK.unsqueeze(-1) * (expert_TK.unsqueeze(-1) == every_E)).sum(1)
    inner_ETI = _all_experts(experts, hidden_TH.expand(len(every_E), -1, -1), inner)
    inner_ETI = experts._apply_gate(inner_ETI) if experts.has_gate else experts.act_fn(inner_ETI)
    outer_ETH = _all_experts(experts, inner_ETI, "down_proj")
    if experts.has_post_expert_norm:
        outer_ETH = experts.post_expert_norm(outer_ETH)
    return torch.einsum("eth,te->th", outer_ETH, weight_TE.to(outer_ETH.dtype)).to(hidden_TH.dtype)


def _all_experts(experts: Any, input_ETI: torch.Tensor, name: str) -> torch.Tensor:
    weight = getattr(experts, name)
    weight_EIO = weight if experts.is_transposed else weight.transpose(1, 2)
    output_ETO = torch.bmm(input_ETI.to(weight.dtype), weight_EIO)
    # on a mesh: each expert whole on one shard of `tensor`, tokens sharded as before
    output_ETO = runtime.current().constrain(output_ETO, ("tensor", BATCH_AXES, None))
    return output_ETO + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else output_ETO


def use_static_shapes(model: nn.Module) -> None:
    """Let ``model`` compute with shapes that do not depend on the data.

    This replaces sdpa attention and mixtures of experts; other attention implementations stay. Recurrent layers then
    always get a padding mask: checking whether a batch has padding would read a value from the device.
    """
    base = without_adapters(model)
    if base.config._attn_implementation == "sdpa":
        register_attention(base, "static", static_sdpa_mask, static_sdpa_attention)
    ALL_EXPERTS_FUNCTIONS.register(STATIC_EXPERTS, static_experts)
    base.set_experts_implementation(STATIC_EXPERTS)
    if any(map(carries_states, base.modules())):
        wrap_forward(base, _with_all_masks)


def _with_all_masks(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _MaskIsNeeded(kwargs.get("attention_mask")):
        return forward(*args, **kwargs)


class _MaskIsNeeded(TorchFunctionMode):
    """Lets `torch.all` of a boolean mask [R, L] return False: transformers would skip a mask that is 1 everywhere."""

    def __init__(self, mask_RL: torch.Tensor | None) -> None:
        super().__init__()
        self._shape = None if mask_RL is None else mask_RL.shape

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_whole = function is torch.all and len(args) == 1 and not kwargs
        if is_whole and args[0].dtype == torch.bool and args[0].shape == self._shape:
            return torch.tensor(False)
        return function(*args, **(kwargs or {}))


class ExpandedRows(Expansion[torch.Tensor]):
    """An expansion on the device, with methods that move tensors into and out of expanded rows."""

    def copies(self, x_RHLD: torch.Tensor, inverse_RL: torch.Tensor | None = None) -> torch.Tensor:
        """Copy tokens into expanded rows, [2R, H, L, D].

        Args:
            x_RHLD: Queries, keys or values in packed rows.
            inverse_RL: The one copy of each token that passes its gradient back. None sums the gradients of all.
        """
        x_RNHD = _Gather.apply(x_RHLD.transpose(1, 2), self.gather_R2L.flatten(1), inverse_RL)
        return x_RNHD.unflatten(1, (2, -1)).flatten(0, 1).transpose(1, 2)

    def outputs(self, x_2RHLD: torch.Tensor) -> torch.Tensor:
        """Return the attention output of each packed token, in transformers' dimension order [R, L, H, D]."""
        x_RNHD = x_2RHLD.transpose(1, 2).unflatten(0, (-1, 2)).flatten(1, 2)
        return _Gather.apply(x_RNHD, self.inverse_RL, self.scatter_R2L.flatten(1))


class _Gather(torch.autograd.Function):
    """Gathers ``x[r, index[r, m]]``, and zeros where the index is -1.

    Args:
        x_RN: Values; any number of dimensions may follow.
        index_RM: The column n that each place m takes its value from; -1 for zeros.
        inverse_RN: The one place m from which column n gets its gradient; -1 for none. If None, the gradients of all
            places that took column n are summed.
    """

    @staticmethod
    def forward(ctx: Any, x_RN: torch.Tensor, index_RM: torch.Tensor, inverse_RN: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(index_RM, inverse_RN)
        ctx.columns = x_RN.shape[1]
        return _take(x_RN, index_RM)

    @staticmethod
    def backward(ctx: Any, gradient_RM: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        index_RM, inverse_RN = ctx.saved_tensors
        if inverse_RN is not None:
            return _take(gradient_RM, inverse_RN), None, None
        # a sum over many copies needs more than bfloat16's 8 bits
        wide = _zero_padding(gradient_RM, index_RM).to(torch.promote_types(gradient_RM.dtype, torch.float32))
        total = wide.new_zeros((len(wide) * ctx.columns, *wide.shape[2:]))
        total = total.index_add(0, _flat_indices(index_RM, ctx.columns), wide.flatten(0, 1))
        return total.unflatten(0, (len(wide), ctx.columns)).to(gradient_RM.dtype), None, None


def _take(x_RN: torch.Tensor, index_RM: torch.Tensor) -> torch.Tensor:
    taken = x_RN.flatten(0, 1).index_select(0, _flat_indices(index_RM, x_RN.shape[1]))
    return _zero_padding(taken.unflatten(0, index_RM.shape), index_RM)


def _flat_indices(index_RM: torch.Tensor, columns: int) -> torch.Tensor:
    """Turn column numbers of each token row into indices of the flattened token rows, [R M].

    Entries of -1 count as column 0; the caller zeroes their values.

    XLA receives constants other than 0 and 1 as program arguments, and a loop cannot take arguments inside a manually
    sharded region. So ``arange`` stands in for a multiplication by ``columns``.
    """
    start_R = torch.arange(0, len(index_RM) * columns, columns, dtype=index_RM.dtype, device=index_RM.device)
    return (torch.relu(index_RM) + start_R[:, None]).flatten()


def _zero_padding(x_RM: torch.Tensor, index_RM: torch.Tensor) -> torch.Tensor:
    return x_RM.masked_fill((index_RM < 0)[(...,) + (None,) * (x_RM.dim() - 2)], 0)


_KERNEL_LAYERS = {"full_attention", "sliding_attention"}
_SUPPORTED = "expanded rows need causal attention, full or in windows, without dropout, sinks and position biases"


class ExpansionImpossible(UserError):
    """The attention kernels cannot compute a model's attention; the message says why. Dense masks may still work."""


@dataclass(frozen=True)
class ExpandedAttention(PackedAttention):
    """Attention in expanded rows, by the runtime's kernel.

    Args:
        rows: The places of the tokens in expanded rows.
        window: Number of tokens of its sequence that a token sees, itself included; None for all.
    """

    rows: ExpandedRows
    window: int | None

    def attend(self, plain: Any, module: nn.Module, *states_BNLD: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """See `PackedAttention.attend`.

        Raises:
            ExpansionImpossible: For dropout, attention sinks, position biases and bidirectional attention.
        """
        is_causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
        has_biases = any(kwargs.get(name) is not None for name in ("s_aux", "position_bias"))
        if kwargs.get("dropout", 0.0) > 0 or is_causal is False or has_biases:
            raise ExpansionImpossible(f"{type(module).__name__}: {_SUPPORTED}.")
        query, key, value = states_BNLD
        scale = scale_of(query, kwargs.get("scaling"))

        def in_expanded_rows(query: Any, key: Any, value: Any, *places: torch.Tensor) -> torch.Tensor:
            rows = ExpandedRows(*places)
            # Only one query copy of each token is read back: its gradient needs no sum over copies.
            copies = rows.copies(query, rows.inverse_RL), rows.copies(key), rows.copies(value)
            segments, cap = rows.segment_R2L.flatten(0, 1), kwargs.get("softcap")
            return rows.outputs(runtime.current().segment_attention(*copies, segments, scale, self.window, cap))

        # Token rows are independent, but the compiler cannot see that: it would send each to every device for the
        # gather. Heads are sharded over `tensor`. Rotary embeddings give float32 under autocast.
        tensors = (query.to(value.dtype), key.to(value.dtype), value, *self.rows)
        axes: list[PartitionSpec] = [(BATCH_AXES, "tensor", None, None)] * 3
        axes += [(BATCH_AXES, *(None,) * (place.dim() - 1)) for place in self.rows]
        return runtime.current().shard_map(in_expanded_rows, tensors, axes, (BATCH_AXES, None, "tensor", None)), None


def expanded_masks(plain: Any, batch: Batch[torch.Tensor], rule: MaskRule, *args: Any, **kwargs: Any) -> Any:
    """Return an `ExpandedAttention` if packed rows have an expansion, else the masks of `tree_masks`."""
    if batch.expansion is None:
        return tree_masks(plain, batch, rule, *args, **kwargs)
    if kwargs.get("use_vmap"):
        raise ExpansionImpossible(f"A layer's mask: {_SUPPORTED}.")
    return ExpandedAttention(ExpandedRows(*batch.expansion), window_of(rule, batch.input_ids_RL.shape[1]))


@torch.compiler.assume_constant_result  # otherwise TorchTPU would compile it
def window_of(rule: MaskRule, length: int) -> int | None:
    """Return the sliding window of a causal mask rule; None without a window shorter than ``length`` columns.

    Raises:
        ExpansionImpossible: If the rule is neither causal nor causal with a sliding window.
    """
    nothing, keys = torch.zeros(1, 1, dtype=torch.long), torch.arange(length)

    def visible(queries: list[int]) -> torch.Tensor:
        sees = rule(nothing, nothing, torch.tensor(queries)[:, None], keys[None, :])
        return torch.as_tensor(sees).broadcast_to(len(queries), length)

    window = int(visible([length - 1]).sum())
    # rules over indices differ at the ends of a token row, or where a window or a chunk is first full
    queries = sorted({0, length // 2, length - 1, *range(max(window - 2, 0), min(window + 2, length))})
    query_Q1 = torch.tensor(queries)[:, None]
    if not torch.equal(visible(queries), (keys <= query_Q1) & (keys > query_Q1 - window)):
        raise ExpansionImpossible(f"A layer's mask: {_SUPPORTED}.")
    return None if window == length else window


def use_expanded_attention(model: PreTrainedModel) -> None:
    """Let ``model`` attend in expanded rows if a packed batch has an expansion.

    All other batches, packed or not, attend with masks as sdpa does.

    Raises:
        ExpansionImpossible: If the model's own code attends, or its config asks for attention that the kernels do not
            support. The first forward raises if the obstacle does not show in the config.
    """
    config: Any = model.config.get_text_config()
    other_layers = set(getattr(config, "layer_types", None) or ()) - _KERNEL_LAYERS
    has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    has_dropout = bool(getattr(config, "attention_dropout", 0))
    if other_layers or has_sinks or has_dropout:
        raise ExpansionImpossible(f"{type(model).__name__}: {_SUPPORTED}.")
    register_attention(model, "expanded", static_sdpa_mask, static_sdpa_attention, expanded_masks)
