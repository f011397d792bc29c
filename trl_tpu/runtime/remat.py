"""Activation checkpointing for XLA: a layer's backward recomputes its forward behind an optimization barrier.

Without the barrier XLA's common-subexpression elimination would keep the first forward's activations. The weights go
behind it too, as copies: so the backward gathers sharded weights again instead of keeping the gathered ones, and the
parameters themselves are not touched (torch_xla's own checkpoint puts the barrier on them in place, which makes every
parameter an output of every program). Chen et al., https://arxiv.org/abs/1604.06174

Operations to keep are seen below autograd: the forward collects what they return, and the recomputed forward is given
that in their place. What is kept goes behind the barrier too, or what is computed from it would be kept as well.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode

from .base import Remat
from .kernels.plain import MATMULS

Operations = frozenset[OpOverload]


def recompute(
    layer: nn.Module, policy: Remat, function: Callable[..., torch.Tensor | tuple[Any, ...]], *args: Any
) -> Any:
    """Call ``function(*args)``, which runs ``layer``; keep for the backward its inputs and what ``policy`` says.

    Tensors inside ``function`` (a partial's keywords) are kept as they are, and get no gradient.
    """
    parameters = list(layer.parameters())
    return _Recompute.apply(layer, kept_operations(policy), function, len(parameters), *parameters, *args)


def kept_operations(policy: Remat) -> Operations:
    """Return the operations whose results a layer's backward is given: none are, or matrix products."""
    return MATMULS if policy == Remat.DOTS else frozenset()


class Keeping(TorchDispatchMode):
    """Collects in `kept` what the operations of ``keep`` return, in order."""

    def __init__(self, keep: Operations) -> None:
        super().__init__()
        self._keep = keep
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in self._keep:
            self.kept.append(result.detach())
        return result


class Reusing(TorchDispatchMode):
    """Gives the operations of ``keep`` what they returned to `Keeping`, in place of running them."""

    def __init__(self, keep: Operations, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self._keep, self._kept = keep, iter(kept)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in self._keep:
            return function(*args, **(kwargs or {}))
        result = next(self._kept)
        # functionalization, which every XLA tensor goes through, calls this with its own wrappers taken off
        return torch._from_functional_tensor(result) if torch._is_functional_tensor(result) else result


def autocast_now() -> torch.autocast:
    """Return a context with the autocast that is on now: a backward runs outside the forward's."""
    dtype, enabled = torch.get_autocast_dtype("xla"), torch.is_autocast_enabled("xla")
    return torch.autocast("xla", dtype, enabled, torch.is_autocast_cache_enabled())


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, layer: nn.Module, keep: Operations, function: Callable[..., Any], count: int, *inputs: Any
    ) -> Any:
        ctx.layer, ctx.keep, ctx.function = layer, keep, function
        ctx.autocast = autocast_now()
        ctx.seed = xm.get_rng_state()
        args = inputs[count:]
        ctx.is_tensor = [isinstance(arg, torch.Tensor) for arg in args]
        ctx.others = [None if is_tensor else arg for arg, is_tensor in zip(args, ctx.is_tensor, strict=True)]
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, torch.Tensor)))
        with torch.no_grad(), Keeping(keep) as keeping:
            outputs = function(*args)
        ctx.kept = keeping.kept
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        weights = [nn.Parameter(_copy(parameter), parameter.requires_grad) for parameter in ctx.layer.parameters()]
        tensors = [_copy(tensor) for tensor in ctx.saved_tensors]
        gradients = tuple(None if gradient is None else gradient.clone() for gradient in gradients)
        kept, ctx.kept = [tensor.clone() for tensor in ctx.kept], []
        xm.optimization_barrier_([*weights, *tensors, *kept, *(each for each in gradients if each is not None)])
        saved = iter(tensors)
        args = [
            next(saved) if is_tensor else other for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
        ]
        with (
            xm.fork_rng(),
            torch.enable_grad(),
            ctx.autocast,
            weights_of(ctx.layer, weights),
            Reusing(ctx.keep, kept),
        ):
            xm.set_rng_state(ctx.seed)
            outputs = ctx.function(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        differentiable = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad and gradient is not None
        ]
        results, incoming = zip(*differentiable, strict=True)
        leaves = [leaf for leaf in (*weights, *tensors) if leaf.requires_grad]
        found = torch.autograd.grad(results, leaves, incoming, allow_unused=True)
        gradient_of = dict(zip(map(id, leaves), found, strict=True))
        return (None, None, None, None, *(gradient_of.get(id(each)) for each in (*weights, *args)))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def weights_of(layer: nn.Module, weights: list[nn.Parameter]) -> AbstractContextManager[None]:
    """Let ``layer`` run with ``weights`` in the place of its parameters, given in the order of ``parameters()``."""
    named: dict[str, torch.Tensor] = dict(zip(dict(layer.named_parameters()), weights, strict=True))
    return _reparametrize_module(layer, named, tie_weights=True)
