"""Types and operations that every runtime knows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from ..errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

#: The mesh axis or axes that each dimension of a tensor goes over, None meaning none.
PartitionSpec = tuple[str | tuple[str, ...] | None, ...]

#: How long processes wait for one that is busy: the first writes a large model to slow storage.
PATIENCE = timedelta(hours=2)

Value = TypeVar("Value")


class Remat(StrEnum):
    """What a layer's backward computes again: nothing, all, or all but its matrix products."""

    NONE = "none"
    FULL = "full"
    DOTS = "dots"

    @classmethod
    def parse(cls, value: str) -> Remat:
        """Read what a user writes.

        Raises:
            UserError: If it is none of the three.
        """
        if value not in list(cls):
            raise UserError(f"remat must be 'full', 'dots' or 'none', got {value!r}.")
        return cls(value)


@dataclass(frozen=True)
class Topology:
    """The devices and processes that train together."""

    devices: int
    """All devices of the mesh."""
    slices: int
    """Groups of devices that a slower network joins."""
    process_index: int
    process_count: int
    """Processes that share the mesh: on a pod there is one a host."""
    description: str
    """What the devices are, for the log."""


@dataclass(frozen=True)
class Planners:
    """What torch's distributed checkpoints need of a device; each is None where torch's own default will do."""

    save: SavePlanner | None = None
    """Takes the values of `Runtime.local_shards`."""
    load: LoadPlanner | None = None
    """Takes tensors on the devices, and fills each device's own part."""
    group: ProcessGroup | None = None
    """The processes that write and read together, from any thread; None for one process by itself."""


@torch.library.custom_op("trl_tpu::einsum", mutates_args=())
def einsum(equation: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute `torch.einsum` of two tensors, each letter of one being in the other or in the result.

    An operation of its own, so that it can be kept when a layer is recomputed: torch_xla's einsum is not seen below
    autograd, and torch's own joins dimensions that are sharded apart.
    """
    return torch.einsum(equation, first, second).contiguous()


@einsum.register_fake
def _(equation: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.einsum(equation, first, second).contiguous()


def _keep_factors(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.equation, *factors = inputs
    ctx.save_for_backward(*factors)


def _einsum_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    first, second = ctx.saved_tensors
    letters, result = ctx.equation.split("->")
    one, two = letters.split(",")
    return (
        None,
        einsum(f"{result},{two}->{one}", gradient, second) if ctx.needs_input_grad[1] else None,
        einsum(f"{result},{one}->{two}", gradient, first) if ctx.needs_input_grad[2] else None,
    )


einsum.register_autograd(_einsum_backward, setup_context=_keep_factors)

_aten = torch.ops.aten
#: Every operation that multiplies matrices.
MATMULS = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.baddbmm.default,
        torch.ops.trl_tpu.einsum.default,
    }
)


def segment_attention(
    q_BHLD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLD: torch.Tensor,
    segment_BL: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute causal attention within the segments of each row, [B, H, L, D].

    Args:
        q_BHLD, k_BGLD, v_BGLD: Queries, keys and values; H is a multiple of G.
        segment_BL: A token sees those with its own number only.
        scale: Of the logits.
        window: How many tokens a token sees, itself among them, counted in columns; None for all.
        softcap: The bound that tanh puts on the logits; None for none.
    """
    column = torch.arange(segment_BL.shape[1], device=segment_BL.device)
    before_LL = column[:, None] - column[None, :]
    seen_LL = before_LL >= 0 if window is None else (before_LL >= 0) & (before_LL < window)
    mask_B1LL = (segment_BL[:, None, :, None] == segment_BL[:, None, None, :]) & seen_LL
    return masked_attention(q_BHLD, k_BGLD, v_BGLD, mask_B1LL, scale, softcap)


def masked_attention(
    q_BHLD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLD: torch.Tensor,
    mask_B1LL: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute attention under a boolean mask, [B, H, L, D]. A query that may see nothing gives no number.

    Args:
        q_BHLD, k_BGLD, v_BGLD, scale, softcap: As in `segment_attention`.
        mask_B1LL: True where a query sees a key.
    """
    groups = q_BHLD.shape[1] // k_BGLD.shape[1]
    if groups > 1:
        k_BGLD, v_BGLD = k_BGLD.repeat_interleave(groups, 1), v_BGLD.repeat_interleave(groups, 1)
    if softcap is None:
        return scaled_dot_product_attention(q_BHLD, k_BGLD, v_BGLD, attn_mask=mask_B1LL, scale=scale)
    logits_BHLL = (q_BHLD @ k_BGLD.mT * scale / softcap).tanh() * softcap
    wide = torch.promote_types(logits_BHLL.dtype, torch.float32)
    weights_BHLL = logits_BHLL.masked_fill(~mask_B1LL, -torch.inf).softmax(-1, dtype=wide)
    return weights_BHLL.to(v_BGLD.dtype) @ v_BGLD
