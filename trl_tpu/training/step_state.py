"""What every step of a run finds on an XLA device, from the first on: so that all of them are the same program."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from ..modeling.stacked import LayerStack
from ..parallel.shard import zeros_laid_out_like
from ..parallel.sharding_plan import Placement
from ..runtime import PartitionSpec, Remat, Runtime
from .optimizer import prepare_optimizer


class StepState:
    """The optimizer's state, gradients to add to, and the layers as a loop where that is asked for.

    Args:
        scanned: What the loop over layers computes again; None for layers one by one.
    """

    def __init__(self, runtime: Runtime, *, scanned: Remat | None) -> None:
        self._runtime, self._scanned = runtime, scanned
        self._optimizer: Optimizer | None = None
        self._stack: LayerStack | None = None
        self.gradient_buffers: dict[nn.Parameter, torch.Tensor] = {}
        self._reached: set[nn.Parameter] = set()  # by gradients of this step

    def prepare(
        self, model: nn.Module, placements: Mapping[str, Placement], optimizer: Optimizer, accumulates: bool
    ) -> bool:
        """Hold the layers as one if they are scanned, and create the state of ``optimizer``; return whether it is new.

        Args:
            placements: Of the model's parameters by name.
            accumulates: Whether gradients of several micro-batches add up.
        """
        if self._scanned is not None:
            if self._stack is None or self._stack.model is not model:
                axes = {name: placement.axes for name, placement in placements.items()}
                self._stack = LayerStack(model, axes, self._scanned, self._runtime)
            self._stack.stack(optimizer)
        if optimizer is self._optimizer:
            if self.gradient_buffers:  # of micro-batches of a training that was interrupted between them
                self._zero()
                self._runtime.step_boundary()
            return False
        self._optimizer, self.gradient_buffers = optimizer, {}
        optimizer.register_step_pre_hook(self._detach_unused)
        prepare_optimizer(optimizer, self._runtime, self.specs(model, placements))
        if accumulates:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.gradient_buffers = {parameter: zeros_laid_out_like(parameter) for parameter in parameters}
            for parameter in filter(lambda each: each.requires_grad, parameters):
                parameter.register_hook(partial(self._note_gradient, parameter))
            self._runtime.step_boundary()
            optimizer.register_step_post_hook(self._zero)
        return True

    def specs(self, model: nn.Module, placements: Mapping[str, Placement]) -> dict[nn.Parameter, PartitionSpec]:
        """Return the mesh axes that the dimensions of the model's parameters, as they are now, go over."""
        specs = {parameter: placements[name].axes for name, parameter in model.named_parameters()}
        return specs if self._stack is None else specs | self._stack.axes

    def attach_gradients(self) -> None:
        """Put a zeroed buffer where a gradient is missing, so that the first micro-batch is no program of its own."""
        for parameter, buffer in self.gradient_buffers.items():
            if parameter.grad is None:
                parameter.grad = buffer

    def unstack(self) -> None:
        """Give the layers back one by one."""
        if self._stack is not None:
            self._stack.unstack()

    def one_by_one(self) -> AbstractContextManager[None]:
        """Give the layers back for as long as the context is open."""
        return nullcontext() if self._stack is None else self._stack.one_by_one()

    def _note_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # as recomputed layers give to weights that they do not use
            self._reached.add(parameter)

    def _detach_unused(self, *_: object) -> None:
        """Leave parameters to the optimizer without a gradient if no backward reached them: they must not decay."""
        for parameter in self.gradient_buffers.keys() - self._reached:
            parameter.grad = None

    def _zero(self, *_: object) -> None:
        self._reached.clear()
        for buffer in self.gradient_buffers.values():
            buffer.zero_()
