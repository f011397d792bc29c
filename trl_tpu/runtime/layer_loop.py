"""Recomputation of layers in the backward, and layers as one compiled loop."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from torch_xla.experimental.scan import _scan_impl_flat
from torch_xla.experimental.stablehlo_custom_call import place_to_device, place_to_host

from .native import MATMULS, PartitionSpec, Remat, Runtime

Operations = frozenset[OpOverload]


def recompute(
    layer: nn.Module, policy: Remat, function: Callable[..., torch.Tensor | tuple[Any, ...]], *args: Any
) -> Any:
    """Call ``function(*args)``, the forward of ``layer``, and recompute it in the backward by torch's checkpoint.

    The results that ``policy`` keeps are saved for the backward. The recomputation reads copies of weights and inputs
    behind a barrier that waits for a gradient: the compiler would otherwise merge it with the forward.
    """
    keeping, autocast, seed = Keeping(kept_operations(policy)), autocast_now(), xm.get_rng_state()
    gradients, is_forward = list[torch.Tensor](), True

    def run() -> Any:
        nonlocal is_forward
        if is_forward:
            is_forward = False
            with keeping:
                return function(*args)
        weights = [nn.Parameter(_copy(parameter), parameter.requires_grad) for parameter in layer.parameters()]
        inputs = [_copy(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        kept, keeping.kept = [tensor.clone() for tensor in keeping.kept], []
        tensors = (tensor for tensor in inputs if isinstance(tensor, torch.Tensor))
        xm.optimization_barrier_([*weights, *tensors, *kept, *gradients])
        with xm.fork_rng(), autocast, weights_of(layer, weights), Reusing(kept_operations(policy), kept):
            xm.set_rng_state(seed)
            return function(*inputs)

    def note(gradient: torch.Tensor) -> torch.Tensor:
        gradients.append(gradient.clone())
        return gradients[-1]

    results = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
    for result in results if isinstance(results, tuple) else (results,):
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.register_hook(note)
    return results


def kept_operations(policy: Remat) -> Operations:
    """Return the operations with results that are kept for the backward: matrix products with "dots", else none."""
    return MATMULS if policy == Remat.DOTS else frozenset()


class Keeping(TorchDispatchMode):
    """Collects the results of the operations in ``keep``, in order, in the list `kept`."""

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
    """Returns the results that `Keeping` collected, instead of running the operations in ``keep``."""

    def __init__(self, keep: Operations, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self._keep, self._kept = keep, iter(kept)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in self._keep:
            return function(*args, **(kwargs or {}))
        result = next(self._kept)
        # XLA tensors pass through functionalization, and it expects results without its wrappers here
        return torch._from_functional_tensor(result) if torch._is_functional_tensor(result) else result


def autocast_now() -> torch.autocast:
    """Return a context with the current autocast settings, for the backward: it runs outside the forward's context."""
    dtype, enabled = torch.get_autocast_dtype("xla"), torch.is_autocast_enabled("xla")
    return torch.autocast("xla", dtype, enabled, torch.is_autocast_cache_enabled())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def weights_of(layer: nn.Module, weights: list[nn.Parameter]) -> AbstractContextManager[None]:
    """Return a context in which ``layer`` uses ``weights``, in the order of ``parameters()``, as its parameters."""
    named: dict[str, torch.Tensor] = dict(zip(dict(layer.named_parameters()), weights, strict=True))
    return _reparametrize_module(layer, named, tie_weights=True)


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
    """Run identical layers as a compiled loop with the program of one layer, and return the last hidden states.

    Args:
        runtime: The runtime that shards gradients.
        layer: One layer. Its parameters are stacked: they hold the weights of all layers in a first dimension.
        axes: Mesh axes of each parameter's dimensions, for one layer.
        policy: Recomputation in the backward, "full" or "dots": see `Remat`.
        hidden: Input of the first layer.
        args, kwargs: Further arguments of each layer. Tensors in them get no gradient.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    # the loop multiplies its inputs by 1, and that would change the type of booleans
    fixed = [tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor for tensor in tensors]

    def run(hidden: torch.Tensor, fixed: Tensors, weights: list[nn.Parameter]) -> torch.Tensor:
        restored = iter([given.to(tensor.dtype) for given, tensor in zip(fixed, tensors, strict=True)])
        layer_args, layer_kwargs = tree_map_only(torch.Tensor, lambda _: next(restored), (args, kwargs))
        with weights_of(layer, weights), _without_checkpointing(layer):
            output = layer(hidden, *layer_args, **layer_kwargs)
        return output[0] if isinstance(output, tuple) else output

    trained = [axes.get(name) for name, weight in layer.named_parameters() if weight.requires_grad]

    def shard_gradients(gradients: Tensors, *first: None) -> Tensors:
        """Shard gradients like their weights: for one layer, or for stacked layers with ``first`` as first axis."""
        return [
            gradient if layout is None else runtime.constrain(gradient, (*first, *layout))
            for gradient, layout in zip(gradients, trained, strict=True)
        ]

    return _Scan.apply(run, shard_gradients, kept_operations(policy), len(fixed), hidden, *fixed, *layer.parameters())


@contextmanager
def _without_checkpointing(layer: nn.Module) -> Iterator[None]:
    """Turn off the layer's activation checkpointing while the context is open: the loop itself recomputes."""
    checkpointing = layer.gradient_checkpointing
    layer.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        layer.gradient_checkpointing = checkpointing


class OnHost(AbstractContextManager[None]):
    """Context in which loops keep their layers' inputs in host memory until the backward."""

    is_open = 0

    def __enter__(self) -> None:
        OnHost.is_open += 1

    def __exit__(self, *_: object) -> None:
        OnHost.is_open -= 1


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, run: Any, shard_gradients: Any, keep: Operations, count: int, hidden: torch.Tensor, *tensors: Any
    ) -> torch.Tensor:
        ctx.run, ctx.shard_gradients, ctx.keep, ctx.count = run, shard_gradients, keep, count
        ctx.autocast = autocast_now()
        fixed, weights = list(tensors[:count]), list(tensors[count:])
        ctx.trained = [weight.requires_grad for weight in weights]
        saves = any(ctx.needs_input_grad)
        ctx.on_host = on_host = bool(OnHost.is_open)

        def step(carry: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
            hidden, *fixed = carry
            # A layer adds an all-reduced tensor to the carry. libtpu mistakes that for a sum over iterations, and
            # all-reduces in float32, twice the bytes. The barrier hides the carry from this optimization.
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
        used: list[bool] = []  # whether a layer computes with each trained weight
        fixed, slices = list(ctx.saved_tensors[: ctx.count]), list(ctx.saved_tensors[ctx.count :])

        def step(carry: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
            gradient, *fixed = carry
            weights = _as_parameters(slices[:count], trained)
            hidden, *kept = slices[count:]
            hidden = (place_to_device(hidden) if ctx.on_host else hidden).detach().requires_grad_()
            with torch.enable_grad(), ctx.autocast, Reusing(ctx.keep, kept):
                output = ctx.run(hidden, fixed, weights)
            leaves = [hidden, *(weight for weight in weights if weight.requires_grad)]
            leaf_gradients = torch.autograd.grad(output, leaves, gradient, allow_unused=True)
            used[:] = [grad is not None for grad in leaf_gradients[1:]]
            pairs = zip(leaves, leaf_gradients, strict=True)
            gradients = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in pairs]
            return [gradients[0], *fixed], ctx.shard_gradients(gradients[1:])

        carry, stacked = _scan_impl_flat(step, [gradient, *fixed], slices, reverse=True)
        stacked = ctx.shard_gradients(stacked, None)
        gradients = iter([grad if is_used else None for grad, is_used in zip(stacked, used, strict=True)])
        weights = [next(gradients) if is_trained else None for is_trained in trained]
        return (None, None, None, None, carry[0], *(None for _ in fixed), *weights)


def _as_parameters(weights: Tensors, trained: list[bool]) -> list[nn.Parameter]:
    return [nn.Parameter(weight.detach(), is_trained) for weight, is_trained in zip(weights, trained, strict=True)]
