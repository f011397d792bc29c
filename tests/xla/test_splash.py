"""Splash attention equals plain attention; jax interprets the TPU kernel on the CPU within torch_xla's program."""

import functools
import importlib.util
from typing import Any

import pytest
import torch

from trl_tpu import runtime
from trl_tpu.runtime.native import segment_attention

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="kernels in Pallas need jax")


def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module with kernels interpreted on a CPU."""
    runtime.current()
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    from trl_tpu.runtime import splash

    make = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", make)
    monkeypatch.setattr(splash, "_PLATFORM", "cpu")
    splash._programs.cache_clear()
    return splash


SHAPES = [
    *((512, 128, None, None), (200, 64, 7, None), (130, 16, 40, 2.0)),
    *((640, 16, None, None), (640, 16, 200, None), (640, 80, 200, 2.0)),
]


@pytest.mark.parametrize(("length", "size", "window", "softcap"), SHAPES)
def test_splash_attention_equals_plain_attention(
    length: int, size: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare outputs and gradients with segments, grouped heads, and padded lengths and head sizes."""
    splash = interpreted(monkeypatch)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, size) for heads in (4, 2, 2))
    weight, segment = torch.randn(2, 4, length, size), torch.randint(0, 4, (2, length)).sort(-1).values

    def outputs_and_gradients(kernel: object, device: str) -> list[torch.Tensor]:
        leaves = [tensor.to(device).requires_grad_() for tensor in (q, k, v)]
        output = kernel(*leaves, segment.to(device), size**-0.5, window, softcap)  # type: ignore[operator]
        return [output, *torch.autograd.grad((output * weight.to(device)).sum(), leaves)]

    found = runtime.current().fetch(outputs_and_gradients(splash.splash_attention, "xla"))
    for ours, theirs in zip(found, outputs_and_gradients(segment_attention, "cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # another order of float32 sums
