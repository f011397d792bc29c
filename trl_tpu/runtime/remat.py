"""Activation checkpointing for XLA: a layer's backward recomputes its forward behind an optimization barrier.

Without the barrier XLA's common-subexpression elimination would keep the first forward's activations. The weights go
behind it too, as copies: so the backward gathers sharded weights again instead of keeping the gathered ones, and the
parameters themselves are not touched (torch_xla's own checkpoint puts the barrier on them in place, which makes every
parameter an output of every program). Chen et al., https://arxiv.org/abs/1604.06174
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch.autograd.function import once_differentiable


def recompute(layer: nn.Module, function: Callable[..., torch.Tensor | tuple[Any, ...]], *args: Any) -> Any:
    """Call ``function(*args)``, which runs ``layer``, keeping only its inputs for the backward.

    Tensors inside ``function`` (a partial's keywords) are kept as they are, and get no gradient.
    """
    parameters = list(layer.parameters())
    return _Recompute.apply(layer, function, len(parameters), *parameters, *args)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: nn.Module, function: Callable[..., Any], count: int, *inputs: Any) -> Any:
        ctx.layer, ctx.function, ctx.count = layer, function, count
        ctx.autocast = {
            "dtype": torch.get_autocast_dtype("xla"),
            "enabled": torch.is_autocast_enabled("xla"),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        ctx.seed = xm.get_rng_state()
        args = inputs[count:]
        ctx.is_tensor = [isinstance(arg, torch.Tensor) for arg in args]
        ctx.others = [None if is_tensor else arg for arg, is_tensor in zip(args, ctx.is_tensor, strict=True)]
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, torch.Tensor)))
        with torch.no_grad():
            return function(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        weights = [nn.Parameter(_copy(parameter), parameter.requires_grad) for parameter in ctx.layer.parameters()]
        tensors = [_copy(tensor) for tensor in ctx.saved_tensors]
        gradients = tuple(None if gradient is None else gradient.clone() for gradient in gradients)
        xm.optimization_barrier_([*weights, *tensors, *(gradient for gradient in gradients if gradient is not None)])
        saved = iter(tensors)
        args = [
            next(saved) if is_tensor else other for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
        ]
        with (
            xm.fork_rng(),
            torch.enable_grad(),
            torch.autocast("xla", **ctx.autocast),
            _weights_of(ctx.layer, weights),
        ):
            xm.set_rng_state(ctx.seed)
            outputs = ctx.function(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        differentiable = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad and gradient is not None
        ]
        wanted = [leaf for leaf in (*weights, *tensors) if leaf.requires_grad]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in differentiable],
                wanted,
                [gradient for _, gradient in differentiable],
                allow_unused=True,
            )
        )
        weight_gradients = [next(found) if weight.requires_grad else None for weight in weights]
        arg_gradients = [next(found) if isinstance(arg, torch.Tensor) and arg.requires_grad else None for arg in args]
        return (None, None, None, *weight_gradients, *arg_gradients)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextmanager
def _weights_of(layer: nn.Module, weights: list[nn.Parameter]) -> Iterator[None]:
    """Let ``layer`` run with ``weights`` in the place of its parameters, given in the order of ``parameters()``."""
    new = dict(zip((id(parameter) for parameter in layer.parameters()), weights, strict=True))
    originals = [(module, dict(module._parameters)) for module in layer.modules()]
    for module, parameters in originals:
        for name, parameter in parameters.items():
            if parameter is not None:
                module._parameters[name] = new[id(parameter)]
    try:
        yield
    finally:
        for module, parameters in originals:
            module._parameters.update(parameters)
