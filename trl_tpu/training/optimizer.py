"""The optimizer on compiled devices: its state before step 1, its learning rate as data, gradients that accumulate."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, Adamax, NAdam, Optimizer, RAdam

from ..errors import UserError
from ..modeling.layers import LayerStack, by_layer
from ..parallel.shard import whole, zeros_laid_out_like
from ..parallel.sharding_plan import Placement
from ..runtime import PartitionSpec, Remat, Runtime

logger = logging.getLogger(__name__)


class StepState:
    """The optimizer's state, gradient buffers, and the layers as a loop where that is configured.

    Args:
        scanned: What the loop over layers recomputes; None for layers one by one.
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
        specs = {parameter: placements[name].axes for name, parameter in model.named_parameters()}
        prepare_optimizer(optimizer, self._runtime, specs if self._stack is None else specs | self._stack.axes)
        if accumulates:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.gradient_buffers = {parameter: zeros_laid_out_like(parameter) for parameter in parameters}
            for parameter in filter(lambda each: each.requires_grad, parameters):
                parameter.register_hook(partial(self._note_gradient, parameter))
            self._runtime.step_boundary()
            optimizer.register_step_post_hook(self._zero)
        return True

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


class GradientNorms:
    """The norm of each parameter's gradient in the last step: one vector on the device, read when it is logged.

    Args:
        runtime: Reads the vector.
        is_on: False measures nothing.
    """

    def __init__(self, runtime: Runtime, *, is_on: bool) -> None:
        self._runtime, self._is_on = runtime, is_on
        self._names: list[str] = []
        self._norms_N: torch.Tensor | None = None

    @torch.no_grad()
    def measure(self, model: nn.Module) -> None:
        """Measure the gradients as they are, each layer's alone if layers are stacked. All processes take part."""
        if self._is_on:
            parameters = model.named_parameters()
            gradients = by_layer(model, {name: each.grad for name, each in parameters if each.grad is not None})
            norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients.values()]
            self._names, self._norms_N = [*gradients], torch.stack([*map(whole, norms)])

    def read(self) -> dict[str, float]:
        """Return the norms as `grad_norm/NAME`; nothing if none were measured."""
        if self._norms_N is None:
            return {}
        (norms_N,) = self._runtime.fetch([self._norms_N])
        return {f"grad_norm/{name}": norm for name, norm in zip(self._names, norms_N.tolist(), strict=True)}


# torch's capturable Adam divides by the learning rate, so that 0 makes NaN of a parameter whose gradient was always 0.
# This rate moves nothing: its product with any update is far below what float32 resolves beside a weight.
_SMALLEST_RATE = 1.1e-30


_ALMOST_1 = 1 - 2**-24  # the float32 before 1


# These compute with a learning rate that is a tensor; others of torch would read it from the device.
_RATE_IS_DATA = (Adam, Adamax, NAdam, RAdam)


def prepare_optimizer(optimizer: Optimizer, runtime: Runtime, specs: Mapping[Any, PartitionSpec]) -> None:
    """Create the optimizer's state before the first step, laid out like its parameters, and its learning rate as data.

    An optimizer other than Adam creates its state in step 1, where it is laid out too: one more program.

    Args:
        optimizer: Over parameters on the device.
        runtime: Of the parameters.
        specs: Mesh axes of the parameters' dimensions; a parameter that is not in it is whole on every device.
    """
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    device = parameters[0][0].device
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    if isinstance(optimizer, _RATE_IS_DATA):
        _replace_rates(optimizer, lambda rate: runtime.to_device(torch.tensor([max(rate, _SMALLEST_RATE)]), device)[0])
    else:  # torch_xla bakes 0 and 1 into the program; Adafactor's rate may be None, as it makes its own
        _replace_rates(optimizer, lambda rate: {0: _SMALLEST_RATE, 1: _ALMOST_1}.get(rate, rate))
    _let_state_wait(optimizer, runtime)
    if isinstance(optimizer, Adam):  # AdamW is one
        steps = runtime.to_device(torch.zeros(len(parameters)), device).unbind()
        for (parameter, group), step in zip(parameters, steps, strict=True):
            names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * group["amsgrad"]]
            zeros = {name: zeros_laid_out_like(parameter) for name in names}
            optimizer.state[parameter] = {"step": step.clone(), **zeros}
    else:
        _lay_out_new_state(optimizer, runtime, specs)
    runtime.step_boundary()


def _let_state_wait(optimizer: Optimizer, runtime: Runtime) -> None:
    """Let each step touch a parameter's state only when its gradient is computed.

    libtpu copies state whose layout is not that of the gradient, as of an embedding table. Left alone, it does so when
    a step begins, and holds the copies until it ends.
    """

    def wait(*_: object) -> None:
        for parameter in optimizer.state:
            if parameter.grad is not None:
                state = [each for each in state_on_device(optimizer, parameter) if each.shape == parameter.shape]
                runtime.optimization_barrier([parameter.grad, *state])

    optimizer.register_step_pre_hook(wait)


def store_first_moments(optimizer: Optimizer, dtype: str | None) -> None:
    """Store Adam's first moments as ``dtype`` between steps, and compute updates in the weights' type.

    torch's kernels take moments and gradients of one type only. On XLA the conversions are part of the update.

    Args:
        optimizer: May have state, and may have been given to this function before.
        dtype: torch's name of a type; None leaves the optimizer as it is.

    Raises:
        UserError: The optimizer is not one of torch's that keep first moments.
    """
    if dtype is None:
        return
    if not isinstance(optimizer, _RATE_IS_DATA):
        raise UserError(f"optim_state_dtype needs torch's AdamW, not {type(optimizer).__name__}: leave it out.")
    stored: dict[Any, torch.Tensor] = {}

    def widen(*_: object) -> None:
        for parameter, state in optimizer.state.items():
            if "exp_avg" in state and state["exp_avg"].dtype != parameter.dtype:
                stored[parameter], state["exp_avg"] = state["exp_avg"], state["exp_avg"].to(parameter.dtype)

    def narrow(*_: object) -> None:
        for parameter, state in optimizer.state.items():
            if (wide := state.get("exp_avg")) is not None:
                kept = stored.pop(parameter, None)  # updated in place, as a compiled step's other state is
                state["exp_avg"] = wide.to(getattr(torch, dtype)) if kept is None else kept.copy_(wide)

    narrow()
    optimizer.register_step_pre_hook(widen)
    optimizer.register_step_post_hook(narrow)


def skip_unless(is_finite: Callable[[], torch.Tensor], optimizer: Optimizer, runtime: Runtime) -> None:
    """Skip updates of ``optimizer`` after steps that are not finite, without reading whether they are.

    Old values of weights and state live only within the recorded step, so that the compiled one still updates in
    place. This needs the state beforehand: if an optimizer makes it in its first step, that step is read instead. An
    optimizer's counts on the host, as Adagrad's and Adafactor's of steps, go on.

    Args:
        is_finite: Returns whether the step is finite, [1], on the device.
    """
    has_state, old = bool(optimizer.state), list[torch.Tensor]()

    def tensors() -> list[torch.Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [tensor for each in parameters for tensor in (each, *state_on_device(optimizer, each))]

    def before_update(*_: object) -> None:
        nonlocal has_state
        if has_state:
            old[:] = [tensor.detach().clone() for tensor in tensors()]
        elif runtime.fetch([is_finite()])[0].all():
            has_state = True
        else:
            optimizer.zero_grad(set_to_none=True)  # torch's optimizers pass over parameters without a gradient

    @torch.no_grad()
    def after_update(*_: object) -> None:
        for tensor, value in zip(tensors() if old else (), old, strict=True):
            tensor.copy_(torch.where(is_finite()[0], tensor, value.to(tensor.dtype)))
        old.clear()

    optimizer.register_step_pre_hook(before_update)
    optimizer.register_step_post_hook(after_update)


def state_on_device(optimizer: Optimizer, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors in the state of ``parameter`` on its device; a count of steps may be on the host."""
    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, torch.Tensor) and value.device == parameter.device:
            yield value


def _lay_out_new_state(optimizer: Optimizer, runtime: Runtime, specs: Mapping[Any, PartitionSpec]) -> None:
    """Lay out the state that the first step creates, before that step is executed."""
    logger.warning(
        f"{type(optimizer).__name__} makes its state in its first step, so steps 1 and 2 are compiled separately. "
        "Adam and AdamW compile once."
    )

    is_new = [True]  # a hook cannot remove itself while hooks are called

    def lay_out(*_: object) -> None:
        if not is_new:
            return
        is_new.clear()
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and parameter in specs:
                    state[name] = runtime.constrain(value, specs[parameter])

    optimizer.register_step_post_hook(lay_out)


def _replace_rates(optimizer: Optimizer, replacement: Callable[[Any], Any]) -> None:
    """Replace the groups' learning rates during each step, so that no value of the rate changes the program.

    Schedulers, logs and checkpoints see plain floats.
    """
    rates: list[Any] = []

    def replace(*_: object) -> None:
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        replaced = {rate: replacement(rate) for rate in set(rates)}
        for group in optimizer.param_groups:
            group["lr"] = replaced[group["lr"]]

    def restore(*_: object) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(replace)
    optimizer.register_step_post_hook(restore)


def bare(optimizer: Any) -> Optimizer:
    """Return torch's optimizer out of accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
