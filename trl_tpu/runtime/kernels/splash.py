"""Splash attention, jax's block-sparse flash attention in Pallas, as a differentiable function of XLA tensors.

torch_xla 2.9 wraps the same kernels, but needs flax to be installed, cannot take a soft cap in training, and runs the
forward again in the backward. Here jax traces forward and backward once for each shape, lowered for TPUs wherever this
runs, and torch_xla takes the result into its own program.
https://github.com/jax-ml/jax/tree/jax-v0.7.1/jax/experimental/pallas/ops/tpu/splash_attention

Letters: R rows of tokens, B rows that the kernel attends in, T their tokens end to end, H query heads, G key and value
heads, L length, D size of a head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch_xla._internal.jax_workarounds import requires_jax
from torch_xla.experimental.custom_kernel import to_jax_shape_dtype_struct

from ..remat import is_recomputing
from .blocks import block_size, padded, padded_head, rows_at_once
from .plain import KernelRows

_PLATFORM = "tpu"
"""jax would lower for the device that it finds, which need not be the one that is compiled for."""


def splash_attention(
    q_RHLD: torch.Tensor,
    k_RGLD: torch.Tensor,
    v_RGLD: torch.Tensor,
    rows: KernelRows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute `kernels.plain.attend_in_rows` in memory linear in L.

    Blocks of queries and keys that no segment has in common cost nothing, nor do those above the diagonal, outside the
    window, or of queries that are not needed. Rows whose length is a multiple of 512 are computed without waste.
    """
    result: torch.Tensor = _Splash.apply(q_RHLD, k_RGLD, v_RGLD, rows, scale, window, softcap)
    return result


class _Splash(torch.autograd.Function):
    """Attention that keeps what it is given and what it returns; its backward moves these to the kernel's rows again.

    There they take twice the memory, since what dialogues share has a copy for each. Heads are kept side by side, as
    products give and take them: a head of 64 features would have all of a vector's 128 lanes to itself.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        q, k, v, rows, *settings = args
        moved = _moved(q, k, v, rows)
        forward, ctx.gradients = _programs(*settings, tuple(map(to_jax_shape_dtype_struct, moved)))
        output, *others = forward(moved)
        result = rows.outputs(output[:, :, : q.shape[2], : v.shape[-1]]).flatten(2)
        kept = [*(tensor.transpose(1, 2).flatten(2) for tensor in (q, k, v)), result, *others]
        ctx.rows, ctx.heads = rows, [tensor.shape[1] for tensor in (q, k, v)]
        ctx.waits = any(ctx.needs_input_grad) and not is_recomputing()
        if ctx.waits:  # left alone, the compiler makes what is kept when it is read, and holds what it is made of
            xm.optimization_barrier_(kept)
        ctx.save_for_backward(*kept)
        return result.unflatten(2, (q.shape[1], -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        given = [tensor.clone() for tensor in (gradient, *ctx.saved_tensors)]
        if ctx.waits:  # without a barrier the compiler keeps what the forward moved
            xm.optimization_barrier_(given)
        gradient, q, k, v, result, *kept = given
        q, k, v = leaves = [
            tensor.unflatten(2, (heads, -1)).transpose(1, 2).requires_grad_()
            for tensor, heads in zip((q, k, v), ctx.heads, strict=True)
        ]
        with torch.enable_grad():
            moved = _moved(q, k, v, ctx.rows)
        outputs_and_gradients = (_padded(ctx.rows.spread(each)) for each in (result.view_as(gradient), gradient))
        found = ctx.gradients([*outputs_and_gradients, *kept, *(tensor.detach() for tensor in moved)])
        return (*torch.autograd.grad(moved[:3], leaves, found), *(None,) * 4)


def _moved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: KernelRows) -> list[torch.Tensor]:
    """Return what the kernel takes: queries, keys and values, and for each place its segment and if it is needed."""
    segment = rows.segment_2RL
    columns = padded(segment.shape[1]) - segment.shape[1]
    return [
        *map(_padded, (rows.queries(q), rows.copies(k), rows.copies(v))),
        pad(segment, (0, columns), value=-1).int(),  # columns without tokens see each other only
        pad(rows.needed_2RL.int(), (0, columns)),
    ]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Pad columns, and features of heads, to what the kernel takes: zeros add nothing to products."""
    length, size = tensor.shape[2:]
    return pad(tensor, (0, padded_head(size) - size, 0, padded(length) - length)).contiguous()


Program = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@functools.cache
@requires_jax
def _programs(
    scale: float, window: int | None, softcap: float | None, inputs: tuple[Any, ...]
) -> tuple[Program, Program]:
    """Return `attention_functions` for one set of shapes, as functions of XLA tensors."""
    import jax

    forward, backward = attention_functions(scale, window, softcap, inputs[0].shape)
    output, logsumexp = jax.eval_shape(forward, *inputs)
    return _lowered(forward, inputs), _lowered(backward, (output, output, logsumexp, *inputs))


Function = Callable[..., tuple[Any, ...]]


def attention_functions(
    scale: float, window: int | None, softcap: float | None, shape: Sequence[int]
) -> tuple[Function, Function]:
    """Return attention in jax, and its backward.

    Args:
        shape: Of the queries, [B, H, L, D].

    Returns:
        A function of q, k and v, [B, H or G, L, D], and of segment and needed, [B, L], which returns the output and,
        [B, H, L], the logarithms of sums of exponentiated logits. And a function of the output, its gradient, these
        logarithms and the same inputs, which returns the gradients of q, k and v. The output that it is given, and
        the gradient, are 0 where no output is needed.
    """
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    rows, heads, length, _ = shape

    def joined(each: Any) -> Any:
        return jnp.swapaxes(each, 0, 1).reshape(each.shape[1], -1, *each.shape[3:])

    def parted(each: Any) -> Any:
        return jnp.swapaxes(each.reshape(len(each), -1, length, *each.shape[2:]), 0, 1)

    def forward(q: Any, k: Any, v: Any, segment: Any, needed: Any) -> tuple[Any, ...]:
        kernel, segments, is_run_T = _kernel(heads, segment, needed, window, softcap)
        output, (logsumexp,) = kernel(joined(q * scale), joined(k), joined(v), segments)
        return parted(jnp.where(is_run_T[:, None], output, 0)), parted(logsumexp)

    def backward(
        output: Any, gradient: Any, logsumexp: Any, q: Any, k: Any, v: Any, segment: Any, needed: Any
    ) -> tuple[Any, ...]:
        kernel, segments, _ = _kernel(heads, segment, needed, window, softcap)
        kept = (*map(joined, (q * scale, k, v)), segments, None, *map(joined, (output, logsumexp)))
        # jax's own, which its forward hides where it returns the logarithms: from them nothing is computed again
        found = splash_attention_kernel._splash_attention_bwd(
            **kernel.kwargs, res=(*kept, kernel.dq_mask_info, kernel.dkv_mask_info), do=joined(gradient)
        )
        dq, dk, dv = map(parted, found[3:6])
        return dq * scale, dk, dv

    most = rows_at_once(length)
    return _in_groups(forward, rows, most), _in_groups(backward, rows, most)


def _in_groups(function: Function, rows: int, most: int) -> Function:
    """Return ``function`` of tensors whose first dimension is ``rows``, called with at most ``most`` of them.

    Groups are a loop, so that the kernel is compiled once for all, and once for the rows that are left over.
    """
    if rows <= most:
        return function
    import jax
    import jax.numpy as jnp

    whole = rows - rows % most

    def of_all(*tensors: Any) -> tuple[Any, ...]:
        groups = [each[:whole].reshape(-1, most, *each.shape[1:]) for each in tensors]
        found = jax.lax.map(lambda group: function(*group), groups)
        parts = [[each.reshape(whole, *each.shape[2:]) for each in found]]
        if whole < rows:
            parts.append([*function(*(each[whole:] for each in tensors))])
        return tuple(map(jnp.concatenate, zip(*parts, strict=True)))

    return of_all


def _kernel(heads: int, segment: Any, needed: Any, window: int | None, softcap: float | None) -> tuple[Any, Any, Any]:
    """Return jax's kernel for rows end to end, the tokens' segments for it, and which tokens it computes."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    from .splash_blocks import meeting_blocks, with_blocks

    shape = (segment.shape[1],) * 2
    mask = (
        splash_attention_mask.CausalMask(shape)
        if window is None
        else splash_attention_mask.LocalMask(shape, (window - 1, 0), 0)
    )
    block = block_size(segment.shape[1])
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(**{f"block_{name}": block for name in names}),
        attn_logits_soft_cap=softcap,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
    )
    meets = meeting_blocks(segment, needed > 0, block)
    segments = splash_attention_kernel.SegmentIds(segment.ravel(), segment.ravel())
    return with_blocks(kernel, meets), segments, jnp.repeat(meets.any(2).ravel(), block)


def _lowered(function: Callable[..., Any], inputs: Sequence[Any]) -> Program:
    """Return a jax function of arrays like ``inputs`` as one of XLA tensors, which the program around it takes in."""
    import jax

    lowered = jax.jit(function, keep_unused=True).trace(*inputs).lower(lowering_platforms=(_PLATFORM,))
    module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    computation = xb.computation_from_module_proto(function.__name__, module)
    return lambda tensors: torch_xla._XLAC._xla_user_computation("xla::splash", list(tensors), computation)
