"""Layers that are alike as a loop: XLA compiles one layer's forward and one's backward, however deep the model is.

torch_xla's `scan` differentiates through AOTAutograd, which splits einsums, does not see layouts of activations nor
kernels, and needs jax for sharded gradients. Its loop primitive underneath takes any traced function. So the backward
here is a loop of its own: each turn computes a layer again from its saved input, or from that and what its matrix
products returned, and differentiates it while tracing. Two loops share nothing that XLA could keep between them, so
this needs no barriers.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_xla.experimental.scan import _scan_impl_flat
from torch_xla.experimental.stablehlo_custom_call import place_to_device, place_to_host

from .base import PartitionSpec, Remat
from .native import Runtime
from .remat import Keeping, Operations, Reusing, autocast_now, kept_operations, weights_of

Tensors = list[torch.Tensor]


def scan_layers(
    runtime: Runtime,
    layer: nn.Module,
    axes: Mapping[str, PartitionSpec],
    policy: Remat,
    hidden: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Return ``hidden`` after all layers whose weights ``layer`` has: `Runtime.scan` of PyTorch/XLA."""
    leaves, structure = tree_flatten((args, kwargs))
    dtypes = [leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    given = list(zip(leaves, dtypes, strict=True))
    # the loop multiplies its inputs by 1, which booleans would not survive
    fixed = [leaf.to(torch.uint8) if dtype == torch.bool else leaf for leaf, dtype in given if dtype is not None]
    layouts = [axes.get(name) for name, _ in layer.named_parameters()]
    weights = list(layer.parameters())

    def run(hidden: torch.Tensor, fixed: Tensors, weights: list[nn.Parameter]) -> torch.Tensor:
        tensors = iter(fixed)
        filled = [leaf if dtype is None else next(tensors).to(dtype) for leaf, dtype in given]
        args, kwargs = tree_unflatten(filled, structure)
        with weights_of(layer, weights), _once(layer):
            output = layer(hidden, *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        if output.dtype != hidden.dtype:
            raise TypeError(
                f"A layer turns {hidden.dtype} into {output.dtype}, which no loop can carry: leave scan_layers out."
            )
        return output

    trained = [layout for layout, weight in zip(layouts, weights, strict=True) if weight.requires_grad]

    def laid_out(gradients: Tensors, *first: None) -> Tensors:
        """Lay gradients out like their weights: of one layer, or behind a ``first`` dimension those of all."""
        return [
            each if layout is None else runtime.constrain(each, (*first, *layout))
            for each, layout in zip(gradients, trained, strict=True)
        ]

    return _Scan.apply(run, laid_out, kept_operations(policy), len(fixed), hidden, *fixed, *weights)


@contextmanager
def _once(layer: nn.Module) -> Iterator[None]:
    """Let ``layer`` run without activation checkpointing, which the loop itself does."""
    checkpointing = layer.gradient_checkpointing
    layer.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        layer.gradient_checkpointing = checkpointing


class OnHost(AbstractContextManager[None]):
    """A context in which the inputs of a loop's layers wait for the backward in the memory of the host."""

    is_open = 0

    def __enter__(self) -> None:
        OnHost.is_open += 1

    def __exit__(self, *_: object) -> None:
        OnHost.is_open -= 1


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        run: Any,
        laid_out: Any,
        keep: Operations,
        count: int,
        hidden: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.run, ctx.laid_out, ctx.keep, ctx.count = run, laid_out, keep, count
        ctx.autocast = autocast_now()
        fixed, weights = list(tensors[:count]), list(tensors[count:])
        ctx.trained = [weight.requires_grad for weight in weights]
        saves = any(ctx.needs_input_grad)
        ctx.on_host = on_host = bool(OnHost.is_open)

        def step(carry: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
            hidden, *fixed = carry
            # A block adds to what the loop carries a sum that devices make. libtpu takes that for a sum over the turns
            # and has it made in float32, twice the bytes, unless it does not see what it is added to.
            xm.optimization_barrier_([hidden])
            with torch.no_grad(), Keeping(keep) as keeping:
                output = run(hidden, fixed, _as_parameters(weights, [False] * len(weights)))
            return [output, *fixed], [place_to_host(hidden) if on_host else hidden, *keeping.kept] if saves else []

        carry, saved = _scan_impl_flat(step, [hidden, *fixed], weights)
        ctx.save_for_backward(*fixed, *weights, *saved)
        return carry[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        trained, count = ctx.trained, len(ctx.trained)
        used: list[bool] = []  # of the trained weights, those that a layer computes with
        fixed, slices = list(ctx.saved_tensors[: ctx.count]), list(ctx.saved_tensors[ctx.count :])

        def step(carry: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
            gradient, *fixed = carry
            weights = _as_parameters(slices[:count], trained)
            hidden, *kept = slices[count:]
            hidden = (place_to_device(hidden) if ctx.on_host else hidden).detach().requires_grad_()
            with torch.enable_grad(), ctx.autocast, Reusing(ctx.keep, kept):
                output = ctx.run(hidden, fixed, weights)
            wanted = [hidden, *(weight for weight in weights if weight.requires_grad)]
            found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
            used[:] = [each is not None for each in found[1:]]
            pairs = zip(wanted, found, strict=True)
            gradients = [torch.zeros_like(leaf) if each is None else each for leaf, each in pairs]
            return [gradients[0], *fixed], ctx.laid_out(gradients[1:])

        carry, found = _scan_impl_flat(step, [gradient, *fixed], slices, reverse=True)
        found = ctx.laid_out(found, None)
        gradients = iter([each if is_used else None for each, is_used in zip(found, used, strict=True)])
        weights = [next(gradients) if is_trained else None for is_trained in trained]
        return (None, None, None, None, carry[0], *(None for _ in fixed), *weights)


def _as_parameters(weights: Tensors, trained: list[bool]) -> list[nn.Parameter]:
    return [nn.Parameter(weight.detach(), is_trained) for weight, is_trained in zip(weights, trained, strict=True)]
