"""Splash attention, jax's flash attention in Pallas, as a differentiable function of XLA tensors.

torch_xla 2.9 wraps the same kernels, but its wrapper needs flax and does not support a soft cap in training. Here jax
traces forward and backward once per shape and lowers them for TPUs, also on machines without a TPU. torch_xla inserts
the result into its own program. As in torch_xla's wrapper, the backward runs the forward again.
https://github.com/jax-ml/jax/tree/jax-v0.7.1/jax/experimental/pallas/ops/tpu/splash_attention

Letters: B token rows, H query heads, G key and value heads, L length, D head size.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch_xla._internal.jax_workarounds import requires_jax
from torch_xla.experimental.custom_kernel import to_jax_shape_dtype_struct

#: Size of a TPU's vectors: lengths and head sizes are padded to multiples of it.
LANES = 128
#: Queries and keys per block, the default of torch_xla and MaxText; smaller for shorter token rows.
BLOCK = 512


def splash_attention(
    q_BHLD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLD: torch.Tensor,
    segment_BL: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute `native.segment_attention` with memory linear in L.

    Blocks of queries and keys above the diagonal or outside the window are skipped.
    """
    length, size = q_BHLD.shape[2], v_BGLD.shape[3]
    # padding columns get a segment that no token has
    segment = pad(segment_BL, (0, -length % LANES), value=-1).int()
    output: torch.Tensor = _Splash.apply(*map(_padded, (q_BHLD, k_BGLD, v_BGLD)), segment, scale, window, softcap)
    return output[:, :, :length, :size]


class _Splash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        tensors, settings = args[:4], args[4:]
        forward, ctx.gradients = _programs(*settings, tuple(map(to_jax_shape_dtype_struct, tensors)))
        ctx.save_for_backward(*tensors)
        return forward(tensors)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return (*ctx.gradients([gradient, *ctx.saved_tensors]), *(None,) * 4)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Pad columns and head features with zeros to sizes that the kernel supports. Zeros do not change products.

    Columns are padded to a multiple of `LANES`. Head features are padded to half of `LANES` or to a multiple of it.
    """
    length, size = tensor.shape[2:]
    lanes = LANES // 2 if size <= LANES // 2 else LANES
    return pad(tensor, (0, -size % lanes, 0, -length % LANES)).contiguous()


Program = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
Function = Callable[..., tuple[Any, ...]]


@functools.cache
@requires_jax
def _programs(
    scale: float, window: int | None, softcap: float | None, inputs: tuple[Any, ...]
) -> tuple[Program, Program]:
    """Return the `attention_functions` for one set of shapes, as functions of XLA tensors."""
    import jax

    forward, backward = attention_functions(scale, window, softcap, inputs[0].shape)
    return _lowered(forward, inputs), _lowered(backward, (*jax.eval_shape(forward, *inputs), *inputs))


def attention_functions(
    scale: float, window: int | None, softcap: float | None, shape: Sequence[int]
) -> tuple[Function, Function]:
    """Return attention in jax, and its backward.

    Args:
        scale: Factor of the logits.
        window: Number of columns that a token sees, its own column included; None for all.
        softcap: Bound of the logits, applied by tanh; None for no bound.
        shape: Shape of the queries, [B, H, L, D].

    Returns:
        The forward, a function of q, k and v, [B, H or G, L, D], and the segments, [B, L]: it returns the output. And
        the backward, a function of the output's gradient and the same inputs: it returns the gradients of q, k and v.
    """
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    _, heads, length, _ = shape
    mask: Any = splash_attention_mask.CausalMask((length, length))
    if window is not None:
        mask = splash_attention_mask.LocalMask((length, length), (window - 1, 0), 0)
    block = math.gcd(length, BLOCK)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")

    def attend(q: Any, k: Any, v: Any, segment: Any) -> Any:
        kernel = splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask([mask] * heads),
            block_sizes=splash_attention_kernel.BlockSizes(**{f"block_{name}": block for name in names}),
            attn_logits_soft_cap=softcap,
            head_shards=1,
            q_seq_shards=1,
        )
        return kernel(q * scale, k, v, splash_attention_kernel.SegmentIds(segment, segment))

    def forward(q: Any, k: Any, v: Any, segment: Any) -> tuple[Any, ...]:
        return (jax.vmap(attend)(q, k, v, segment),)

    def backward(gradient: Any, q: Any, k: Any, v: Any, segment: Any) -> tuple[Any, ...]:
        _, pull_back = jax.vjp(jax.vmap(attend), q, k, v, segment)
        return pull_back(gradient)[:3]

    return forward, backward


def _lowered(function: Function, inputs: Sequence[Any]) -> Program:
    """Turn a jax function of arrays like ``inputs`` into a function of XLA tensors, for use in torch_xla's program."""
    import jax

    # jax's default platform is the attached device, which may differ from the device that is compiled for
    lowered = jax.jit(function, keep_unused=True).trace(*inputs).lower(lowering_platforms=("tpu",))
    module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    computation = xb.computation_from_module_proto(function.__name__, module)
    return lambda tensors: torch_xla._XLAC._xla_user_computation("xla::splash", list(tensors), computation)
