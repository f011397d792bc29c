"""Splash attention, jax's block-sparse flash attention in Pallas, as a differentiable function of XLA tensors.

torch_xla 2.9 wraps the same kernel, but needs flax to be installed, cannot take a soft cap in training, and runs the
forward again in the backward. Here jax traces forward and backward once for each shape, lowered for TPUs wherever this
runs, and torch_xla takes the result into its own program.
https://github.com/jax-ml/jax/tree/jax-v0.7.1/jax/experimental/pallas/ops/tpu/splash_attention

Letters: B rows, H query heads, G key and value heads, L length, D size of a head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch.nn.functional import pad
from torch_xla._internal.jax_workarounds import requires_jax
from torch_xla.experimental.custom_kernel import to_jax_shape_dtype_struct

from .blocks import block_size, has_fused_backward, padded, padded_head

_PLATFORM = "tpu"
"""jax would lower for the device that it finds, which need not be the one that is compiled for."""


def splash_attention(
    q_BHLD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLD: torch.Tensor,
    segment_BL: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    needed_BL: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.segment_attention` in memory linear in L.

    Blocks of queries and keys that no segment has in common cost nothing, nor do those above the diagonal, outside the
    window, or of queries that are not needed. Rows whose length is a multiple of 512 are computed without waste.
    """
    length, size = q_BHLD.shape[2], v_BGLD.shape[-1]
    columns = padded(length) - length
    # zeros add nothing to products; columns without tokens see each other only
    q, k, v = (
        pad(tensor, (0, padded_head(tensor.shape[-1]) - tensor.shape[-1], 0, columns)).contiguous()
        for tensor in (q_BHLD, k_BGLD, v_BGLD)
    )
    segment = pad(segment_BL, (0, columns), value=-1).int()
    needed = torch.ones_like(segment_BL) if needed_BL is None else needed_BL
    needed = pad(needed.int(), (0, columns))
    return _Splash.apply(q, k, v, segment, needed, scale, window, softcap)[:, :, :length, :size]


class _Splash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        *tensors, scale, window, softcap = args
        forward, ctx.gradients = _programs(scale, window, softcap, tuple(map(to_jax_shape_dtype_struct, tensors)))
        output, *residuals = forward(tensors)
        ctx.save_for_backward(*residuals)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return (*ctx.gradients([gradient.contiguous(), *ctx.saved_tensors]), *(None,) * 5)


Program = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@functools.cache
@requires_jax
def _programs(
    scale: float, window: int | None, softcap: float | None, inputs: tuple[Any, ...]
) -> tuple[Program, Program]:
    """The forward, which returns the output and what the backward needs, and the backward, for one set of shapes."""
    import jax

    pullback: list[Any] = []

    def forward(q: Any, k: Any, v: Any, segment: Any, needed: Any) -> tuple[Any, ...]:
        output, pull = jax.vjp(lambda q, k, v: _attend(q * scale, k, v, segment, needed, window, softcap), q, k, v)
        residuals, structure = jax.tree.flatten(pull)
        pullback[:] = [structure]
        return output, *residuals

    def backward(gradient: Any, *residuals: Any) -> tuple[Any, ...]:
        return jax.tree.unflatten(pullback[0], residuals)(gradient)

    outputs = jax.eval_shape(forward, *inputs)
    return _lowered(forward, inputs), _lowered(backward, outputs)


def _attend(q: Any, k: Any, v: Any, segment: Any, needed: Any, window: int | None, softcap: float | None) -> Any:
    """The kernel, in jax, on rows put end to end."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    from . import splash_backward
    from .splash_blocks import meeting_blocks, with_blocks

    rows, heads, length, size = q.shape
    is_fused = has_fused_backward(length, (size, v.shape[-1]), q.dtype.itemsize)
    shape = (length, length)
    mask = (
        splash_attention_mask.CausalMask(shape)
        if window is None
        else splash_attention_mask.LocalMask(shape, (window - 1, 0), 0)
    )
    block = block_size(length)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(**{f"block_{name}": block for name in names}),
        attn_logits_soft_cap=softcap,
        save_residuals=is_fused,
        head_shards=1,
        q_seq_shards=1,
    )

    meets = meeting_blocks(segment, needed > 0, block)
    q, k, v = (jnp.swapaxes(each, 0, 1).reshape(each.shape[1], rows * length, -1) for each in (q, k, v))
    segments = splash_attention_kernel.SegmentIds(segment.ravel(), segment.ravel())
    kernel = with_blocks(kernel, meets)
    if is_fused:
        output = splash_backward.attend(kernel, q, k, v, segments, rows, block, window)
    else:
        output = kernel(q, k, v, segments)
    output = jnp.where(jnp.repeat(meets.any(2).ravel(), block)[:, None], output, 0)
    return jnp.swapaxes(output.reshape(heads, rows, length, -1), 0, 1)


def _lowered(function: Callable[..., Any], inputs: Sequence[Any]) -> Program:
    """A jax function of arrays like ``inputs`` as one of XLA tensors, which the program around it takes in."""
    import jax

    lowered = jax.jit(function, keep_unused=True).trace(*inputs).lower(lowering_platforms=(_PLATFORM,))
    module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    computation = xb.computation_from_module_proto(function.__name__, module)
    return lambda tensors: torch_xla._XLAC._xla_user_computation("xla::splash", list(tensors), computation)
