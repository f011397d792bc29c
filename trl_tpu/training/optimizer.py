"""Optimizers: state and context of updates, on compiled devices too; gradient norms; learning rate schedules."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Adamax, NAdam, Optimizer, RAdam
from transformers import SchedulerType, get_scheduler

from ..checkpoint.state_dict import state_dtype
from ..config.reward_config import RewardConfig
from ..errors import UserError
from ..modeling.layers import LayerStack, by_layer
from ..parallel.mesh import Placement
from ..parallel.shard import full_tensor, zeros_sharded_like
from ..runtime import PartitionSpec, Remat, Runtime


class StepState:
    """Optimizer state, gradient buffers and stacked layers of a run, and what surrounds each of its updates.

    Args:
        scanned: Rematerialization policy of the loop over stacked layers; None keeps the layers separate.
        moments: Name of the torch dtype that stores Adam's first moments; None leaves them in the weights' dtype.
    """

    _optimizer: Any = None  # of the last run
    _stack: LayerStack | None = None

    def __init__(self, runtime: Runtime, *, scanned: Remat | None = None, moments: str | None = None) -> None:
        self._runtime, self._scanned, self._moments = runtime, scanned, moments
        self.gradient_buffers: dict[nn.Parameter, torch.Tensor] = {}
        self._with_gradient: set[nn.Parameter] = set()  # parameters with a gradient in this step

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, placements: Mapping[str, Placement], accumulates: bool
    ) -> None:
        """Get ready for the first step of a run, before a checkpoint is loaded.

        Args:
            placements: The placements of the model's parameters by name.
            accumulates: Whether gradients of several micro-batches are accumulated.

        Raises:
            UserError: The optimizer has no first moments to store in another dtype.
        """
        if self._runtime.is_spmd:
            self._prepare_compiled(model, optimizer, placements, accumulates)
        self._optimizer, self._has_state = optimizer, bool(optimizer.state)
        whole = [each for group in optimizer.param_groups for each in group["params"] if not isinstance(each, DTensor)]
        self._halves = [each for each in whole if each.dtype == torch.float16]
        if self._moments is not None:
            if not isinstance(optimizer, _TENSOR_RATE_OPTIMIZERS):
                raise UserError(
                    f"optim_state_dtype needs torch's AdamW, got {type(optimizer).__name__}. Leave it out."
                )
            _narrow_moments(optimizer, self._moments, {})
        self._runtime.fuse(optimizer)

    def _prepare_compiled(
        self, model: nn.Module, optimizer: Optimizer, placements: Mapping[str, Placement], accumulates: bool
    ) -> None:
        """Stack layers if they are scanned, and create the state of a new optimizer."""
        if self._scanned is not None:
            if self._stack is None or self._stack.model is not model:
                axes = {name: placement.axes for name, placement in placements.items()}
                self._stack = LayerStack(model, axes, self._scanned, self._runtime)
            self._stack.stack(optimizer)
        specs: dict[Any, PartitionSpec] = {each: placements[name].axes for name, each in model.named_parameters()}
        self._specs = specs | ({} if self._stack is None else self._stack.axes)
        if optimizer is not self._optimizer:
            self.gradient_buffers = {}
            create_state(optimizer, self._runtime)
            if accumulates:
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                self.gradient_buffers = {parameter: zeros_sharded_like(parameter) for parameter in parameters}
                for parameter in filter(lambda tensor: tensor.requires_grad, parameters):
                    parameter.register_hook(partial(self._note_gradient, parameter))
        else:  # training may have been interrupted between micro-batches
            self._zero()
        self._runtime.step_boundary()

    @contextmanager
    def update(self, is_finite_1: torch.Tensor | None) -> Iterator[None]:
        """Return the context of an optimizer's step.

        Args:
            is_finite_1: Whether the step is finite, a bool tensor on the device. The update of a nonfinite step is
                skipped. None skips none.
        """
        optimizer, runtime = self._optimizer, self._runtime
        with ExitStack() as around:
            if runtime.is_spmd:
                around.enter_context(self._used_gradients())
                around.enter_context(_rates_as_data(optimizer, runtime))
                _delay_state_copies(optimizer, runtime)
                around.enter_context(_new_state_sharded(optimizer, runtime, self._specs))
            if is_finite_1 is not None:
                around.enter_context(self._skip_unless(is_finite_1))
            around.enter_context(_in_float32(self._halves))
            if self._moments is not None:
                around.enter_context(_wide_moments(optimizer, self._moments))
            yield

    def attach_gradients(self) -> None:
        """Set missing gradients to zeroed buffers: all micro-batches of a step then run the same program."""
        for parameter, buffer in self.gradient_buffers.items():
            if parameter.grad is None:
                parameter.grad = buffer

    def unstack(self) -> None:
        """Turn stacked layers back into separate layers."""
        if self._stack is not None:
            self._stack.unstack()

    def unstacked(self) -> AbstractContextManager[None]:
        """Return a context in which stacked layers are separate."""
        return nullcontext() if self._stack is None else self._stack.unstacked()

    def _note_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # recomputed layers pass None for unused weights
            self._with_gradient.add(parameter)

    @contextmanager
    def _used_gradients(self) -> Iterator[None]:
        """Remove the zeroed gradients of unused parameters, to keep the optimizer from decaying these parameters."""
        for parameter in self.gradient_buffers.keys() - self._with_gradient:
            parameter.grad = None
        yield
        self._zero()

    def _zero(self) -> None:
        self._with_gradient.clear()
        for buffer in self.gradient_buffers.values():
            buffer.zero_()

    @contextmanager
    def _skip_unless(self, is_finite_1: torch.Tensor) -> Iterator[None]:
        """Skip the update of a nonfinite step, if possible without reading a value from the device.

        On compiled devices, the recorded step restores the old weights and state, and the compiled step still updates
        in place. This requires existing state: if an optimizer creates its state in its first step, that step's result
        is read from the device instead. Counters on the host, such as the step counts of Adagrad and Adafactor, also
        count skipped steps.
        """
        optimizer, old = self._optimizer, list[torch.Tensor]()

        def tensors() -> list[torch.Tensor]:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            return [tensor for weight in parameters for tensor in (weight, *state_on_device(optimizer, weight))]

        if self._runtime.is_spmd and self._has_state:
            old = [tensor.detach().clone() for tensor in tensors()]
        elif isinstance(optimizer, Adam) and all(group["fused"] for group in optimizer.param_groups):
            optimizer.found_inf = (~is_finite_1[0]).float()  # type: ignore[attr-defined]  # its kernel reads it on the device
        elif is_finite_1:  # read from the device
            self._has_state = True
        else:
            optimizer.zero_grad(set_to_none=True)  # torch's optimizers skip parameters without a gradient
        yield
        with torch.no_grad():
            for tensor, value in zip(tensors() if old else (), old, strict=True):
                tensor.copy_(torch.where(is_finite_1[0], tensor, value.to(tensor.dtype)))


@torch.no_grad()
def gradient_norms(model: nn.Module) -> tuple[list[str], torch.Tensor]:
    """Compute the norm of each gradient, per layer if layers are stacked. All processes take part.

    Returns:
        The names to log, and the norms as one vector on the device.
    """
    parameters = model.named_parameters()
    gradients = by_layer(model, {name: tensor.grad for name, tensor in parameters if tensor.grad is not None})
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients.values()]
    return [f"grad_norm/{name}" for name in gradients], torch.stack([*map(full_tensor, norms)])


# This value replaces a learning rate of 0: torch's capturable Adam divides by the rate, and a rate of 0 turns a
# parameter with zero gradients into NaN. This rate is too small to change any float32 weight.
_SMALLEST_RATE = 1.1e-30


_ALMOST_1 = 1 - 2**-24  # the float32 before 1


# These optimizers compute with a tensor as learning rate. Torch's other optimizers would read it from the device.
_TENSOR_RATE_OPTIMIZERS = (Adam, Adamax, NAdam, RAdam)


def create_state(optimizer: Optimizer, runtime: Runtime) -> None:
    """Create the optimizer's state with its parameters' sharding before step 1.

    An optimizer other than Adam creates its state in step 1, so step 2 is compiled separately.
    """
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    if not isinstance(optimizer, Adam):  # AdamW is a subclass
        return
    steps = runtime.to_device(torch.zeros(len(parameters)), parameters[0][0].device).unbind()
    for (parameter, group), step in zip(parameters, steps, strict=True):
        names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * group["amsgrad"]]
        zeros = {name: zeros_sharded_like(parameter).to(state_dtype(parameter)) for name in names}
        optimizer.state[parameter] = {"step": step.clone(), **zeros}


@contextmanager
def _rates_as_data(optimizer: Optimizer, runtime: Runtime) -> Iterator[None]:
    """Replace the groups' learning rates, to keep a new rate from changing the program.

    Schedulers, logs and checkpoints still see plain floats.
    """
    device = optimizer.param_groups[0]["params"][0].device

    def replacement(rate: Any) -> Any:
        if isinstance(optimizer, _TENSOR_RATE_OPTIMIZERS):
            return runtime.to_device(torch.tensor([max(rate, _SMALLEST_RATE)]), device)[0]
        # torch_xla compiles 0 and 1 into the program as constants; Adafactor's rate may be None
        return {0: _SMALLEST_RATE, 1: _ALMOST_1}.get(rate, rate)

    rates = [group["lr"] for group in optimizer.param_groups]
    replaced = {rate: replacement(rate) for rate in set(rates)}
    for group in optimizer.param_groups:
        group["lr"] = replaced[group["lr"]]
    yield
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _delay_state_copies(optimizer: Optimizer, runtime: Runtime) -> None:
    """Keep a step from reading a parameter's state before its gradient is computed.

    libtpu copies optimizer state if its memory layout differs from the gradient's, for example for an embedding table.
    Without this barrier it makes the copies at the beginning of a step and holds them until the end.
    """
    for parameter in optimizer.state:
        if parameter.grad is not None:
            state = [value for value in state_on_device(optimizer, parameter) if value.shape == parameter.shape]
            runtime.optimization_barrier([parameter.grad, *state])


@contextmanager
def _new_state_sharded(optimizer: Optimizer, runtime: Runtime, specs: Mapping[Any, PartitionSpec]) -> Iterator[None]:
    """Shard the state that an optimizer creates in its first step, before that step is executed."""
    is_new = not optimizer.state
    yield
    for parameter, state in optimizer.state.items() if is_new else ():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and parameter in specs:
                state[name] = runtime.constrain(value, specs[parameter])


@contextmanager
def _wide_moments(optimizer: Optimizer, dtype: str) -> Iterator[None]:
    """Compute an update in the weights' dtype: torch's kernels require one dtype for moments and gradients.

    On XLA the conversions are part of the update.
    """
    stored: dict[Any, torch.Tensor] = {}
    for parameter, state in optimizer.state.items():
        if "exp_avg" in state and state["exp_avg"].dtype != parameter.dtype:
            stored[parameter], state["exp_avg"] = state["exp_avg"], state["exp_avg"].to(parameter.dtype)
    yield
    _narrow_moments(optimizer, dtype, stored)


def _narrow_moments(optimizer: Optimizer, dtype: str, stored: Mapping[Any, torch.Tensor]) -> None:
    for parameter, state in optimizer.state.items():
        if (wide := state.get("exp_avg")) is not None:
            moment = stored.get(parameter)  # updated in place, like other state in a compiled step
            state["exp_avg"] = wide.to(getattr(torch, dtype)) if moment is None else moment.copy_(wide)


@contextmanager
def _in_float32(halves: Sequence[nn.Parameter]) -> Iterator[None]:
    """Compute the updates of float16 weights in float32, with state in float32.

    In float16, Adam's epsilon of 1e-8 and the squares of small gradients are 0, and 0 / 0 is NaN.
    """
    weights = {parameter: parameter.data for parameter in halves}
    for parameter, weight in weights.items():
        gradient, parameter.grad = parameter.grad, None
        parameter.data = weight.float()
        parameter.grad = None if gradient is None else gradient.float()
    yield
    for parameter, weight in weights.items():
        parameter.grad, parameter.data = None, weight.copy_(parameter.data)


def state_on_device(optimizer: Optimizer, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the state tensors of ``parameter`` that are on its device. A step count may be on the host."""
    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, torch.Tensor) and value.device == parameter.device:
            yield value


def create_schedule(args: RewardConfig, optimizer: Any, num_training_steps: int) -> Any:
    """Create the learning rate schedule of the settings, and try its first and last step, and the end of its warm-up.

    Raises:
        UserError: An initial learning rate of the optimizer is not above `learning_rate_end`.
    """
    (name, arguments), warmup = args.schedule, args.get_warmup_steps(num_training_steps)
    groups, end = (optimizer.defaults, *optimizer.param_groups), args.learning_rate_end
    if end is not None and (rate := min(group["lr"] for group in groups)) <= end:
        raise UserError(f"learning_rate_end={end} must be below all learning rates, but one is {rate}. Lower it.")
    if name == SchedulerType.POLYNOMIAL:  # it divides by the number of steps after the warm-up
        num_training_steps = max(num_training_steps, warmup + 1)
    schedule = get_scheduler(name, optimizer, warmup, num_training_steps, arguments)
    for factor_at in getattr(schedule, "lr_lambdas", ()):
        _ = [factor_at(step) for step in (0, warmup, num_training_steps)]
    return schedule


def unwrap(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
