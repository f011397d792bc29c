"""Optimizers on compiled devices: state created before step 1, learning rates as data, accumulated gradients."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Adamax, NAdam, Optimizer, RAdam
from transformers import SchedulerType, get_scheduler

from ..checkpoint.state_dict import state_dtype
from ..config.reward_config import RewardConfig
from ..errors import UserError, explaining
from ..modeling.layers import LayerStack, by_layer
from ..parallel.shard import full_tensor, zeros_sharded_like
from ..parallel.sharding_plan import Placement
from ..runtime import PartitionSpec, Remat, Runtime

logger = logging.getLogger(__name__)


class StepState:
    """Optimizer state, gradient buffers, and stacked layers for `scan_layers`.

    Args:
        scanned: Rematerialization policy of the loop over stacked layers; None keeps the layers separate.
    """

    def __init__(self, runtime: Runtime, *, scanned: Remat | None) -> None:
        self._runtime, self._scanned = runtime, scanned
        self._optimizer: Optimizer | None = None
        self._stack: LayerStack | None = None
        self.gradient_buffers: dict[nn.Parameter, torch.Tensor] = {}
        self._with_gradient: set[nn.Parameter] = set()  # parameters with a gradient in this step

    def prepare(
        self, model: nn.Module, placements: Mapping[str, Placement], optimizer: Optimizer, accumulates: bool
    ) -> bool:
        """Stack the layers if they are scanned, and create the state of ``optimizer`` unless that is done.

        Args:
            placements: Placements of the model's parameters by name.
            accumulates: Whether gradients of several micro-batches are accumulated.

        Returns:
            Whether the optimizer is new: False if an earlier call created its state.
        """
        if self._scanned is not None:
            if self._stack is None or self._stack.model is not model:
                axes = {name: placement.axes for name, placement in placements.items()}
                self._stack = LayerStack(model, axes, self._scanned, self._runtime)
            self._stack.stack(optimizer)
        if optimizer is self._optimizer:
            if self.gradient_buffers:  # training was interrupted between micro-batches
                self._zero()
                self._runtime.step_boundary()
            return False
        self._optimizer, self.gradient_buffers = optimizer, {}
        optimizer.register_step_pre_hook(self._detach_unused)
        specs = {parameter: placements[name].axes for name, parameter in model.named_parameters()}
        prepare_optimizer(optimizer, self._runtime, specs if self._stack is None else specs | self._stack.axes)
        if accumulates:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.gradient_buffers = {parameter: zeros_sharded_like(parameter) for parameter in parameters}
            for parameter in filter(lambda tensor: tensor.requires_grad, parameters):
                parameter.register_hook(partial(self._note_gradient, parameter))
            self._runtime.step_boundary()
            optimizer.register_step_post_hook(self._zero)
        return True

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

    def _detach_unused(self, *_: object) -> None:
        """Remove the zeroed gradients of unused parameters, to keep the optimizer from decaying these parameters."""
        for parameter in self.gradient_buffers.keys() - self._with_gradient:
            parameter.grad = None

    def _zero(self, *_: object) -> None:
        self._with_gradient.clear()
        for buffer in self.gradient_buffers.values():
            buffer.zero_()


class GradientNorms:
    """Gradient norm of each parameter in the last step, kept as one vector on the device and read for logs.

    Args:
        runtime: Runtime that reads the vector.
        is_on: Whether to measure the norms.
    """

    def __init__(self, runtime: Runtime, *, is_on: bool) -> None:
        self._runtime, self._is_on = runtime, is_on
        self._names: list[str] = []
        self._norms_N: torch.Tensor | None = None

    @torch.no_grad()
    def measure(self, model: nn.Module) -> None:
        """Compute the norm of each gradient, per layer if layers are stacked. All processes take part."""
        if self._is_on:
            parameters = model.named_parameters()
            gradients = by_layer(model, {name: tensor.grad for name, tensor in parameters if tensor.grad is not None})
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients.values()]
            self._names, self._norms_N = [*gradients], torch.stack([*map(full_tensor, norms)])

    def read(self) -> dict[str, float]:
        """Return the norms as `grad_norm/NAME`; empty if no norms were measured."""
        if self._norms_N is None:
            return {}
        (norms_N,) = self._runtime.fetch([self._norms_N])
        return {f"grad_norm/{name}": norm for name, norm in zip(self._names, norms_N.tolist(), strict=True)}


# This value replaces a learning rate of 0: torch's capturable Adam divides by the rate, and a rate of 0 turns a
# parameter with zero gradients into NaN. This rate is too small to change any float32 weight.
_SMALLEST_RATE = 1.1e-30


_ALMOST_1 = 1 - 2**-24  # the float32 before 1


# These optimizers compute with a tensor as learning rate. Torch's other optimizers would read it from the device.
_TENSOR_RATE_OPTIMIZERS = (Adam, Adamax, NAdam, RAdam)


def prepare_optimizer(optimizer: Optimizer, runtime: Runtime, specs: Mapping[Any, PartitionSpec]) -> None:
    """Create the optimizer's state with its parameters' sharding before step 1, and make its learning rate data.

    An optimizer other than Adam creates and shards its state in step 1, so step 2 is compiled separately.

    Args:
        optimizer: An optimizer of parameters on the device.
        runtime: The parameters' runtime.
        specs: Mesh axes of each parameter's dimensions. Parameters that are missing here are replicated.
    """
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    device = parameters[0][0].device
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    if isinstance(optimizer, _TENSOR_RATE_OPTIMIZERS):
        _replace_rates(optimizer, lambda rate: runtime.to_device(torch.tensor([max(rate, _SMALLEST_RATE)]), device)[0])
    else:  # torch_xla compiles 0 and 1 into the program as constants; Adafactor's rate may be None
        _replace_rates(optimizer, lambda rate: {0: _SMALLEST_RATE, 1: _ALMOST_1}.get(rate, rate))
    _delay_state_copies(optimizer, runtime)
    if isinstance(optimizer, Adam):  # AdamW is a subclass
        steps = runtime.to_device(torch.zeros(len(parameters)), device).unbind()
        for (parameter, group), step in zip(parameters, steps, strict=True):
            names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * group["amsgrad"]]
            zeros = {name: zeros_sharded_like(parameter).to(state_dtype(parameter)) for name in names}
            optimizer.state[parameter] = {"step": step.clone(), **zeros}
    else:
        _lay_out_new_state(optimizer, runtime, specs)
    runtime.step_boundary()


def _delay_state_copies(optimizer: Optimizer, runtime: Runtime) -> None:
    """Keep each step from reading a parameter's state before its gradient is computed.

    libtpu copies optimizer state if its memory layout differs from the gradient's, for example for an embedding table.
    Without this barrier it makes the copies at the beginning of a step and holds them until the end.
    """

    def wait(*_: object) -> None:
        for parameter in optimizer.state:
            if parameter.grad is not None:
                state = [value for value in state_on_device(optimizer, parameter) if value.shape == parameter.shape]
                runtime.optimization_barrier([parameter.grad, *state])

    optimizer.register_step_pre_hook(wait)


def store_first_moments(optimizer: Optimizer, dtype: str | None) -> None:
    """Store Adam's first moments as ``dtype`` between steps, and compute updates in the weights' dtype.

    torch's kernels require one dtype for moments and gradients. On XLA the conversions are part of the update.

    Args:
        optimizer: An optimizer, with or without state. Repeated calls for one optimizer are allowed.
        dtype: Name of a torch dtype; None leaves the optimizer unchanged.

    Raises:
        UserError: The optimizer is not a torch optimizer with first moments.
    """
    if dtype is None:
        return
    if not isinstance(optimizer, _TENSOR_RATE_OPTIMIZERS):
        raise UserError(f"optim_state_dtype requires torch's AdamW (got {type(optimizer).__name__}). Leave it out.")
    stored: dict[Any, torch.Tensor] = {}

    def widen(*_: object) -> None:
        for parameter, state in optimizer.state.items():
            if "exp_avg" in state and state["exp_avg"].dtype != parameter.dtype:
                stored[parameter], state["exp_avg"] = state["exp_avg"], state["exp_avg"].to(parameter.dtype)

    def narrow(*_: object) -> None:
        for parameter, state in optimizer.state.items():
            if (wide := state.get("exp_avg")) is not None:
                moment = stored.pop(parameter, None)  # updated in place, like other state in a compiled step
                state["exp_avg"] = wide.to(getattr(torch, dtype)) if moment is None else moment.copy_(wide)

    narrow()
    optimizer.register_step_pre_hook(widen)
    optimizer.register_step_post_hook(narrow)


def update_in_float32(optimizer: Optimizer) -> None:
    """Compute the updates of float16 weights in float32, with state in float32; DTensors are left unchanged.

    In float16, Adam's epsilon of 1e-8 and the squares of small gradients are 0, and 0 / 0 is NaN.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    halves = [each for each in parameters if each.dtype == torch.float16 and not isinstance(each, DTensor)]
    if not halves:
        return
    weights = dict[nn.Parameter, torch.Tensor]()

    def widen(*_: object) -> None:
        for parameter in halves:
            if parameter.dtype == torch.float16:  # hooks of an earlier `train()` may have widened it
                gradient, weights[parameter] = parameter.grad, parameter.data
                parameter.grad, parameter.data = None, parameter.data.float()
                parameter.grad = None if gradient is None else gradient.float()

    def narrow(*_: object) -> None:
        for parameter, weight in weights.items():
            parameter.grad, parameter.data = None, weight.copy_(parameter.data)
        weights.clear()

    optimizer.register_step_pre_hook(widen)
    optimizer.register_step_post_hook(torch.no_grad()(narrow))


def skip_unless(is_finite: Callable[[], torch.Tensor], optimizer: Optimizer, runtime: Runtime) -> None:
    """Skip the updates of ``optimizer`` in nonfinite steps without reading a value from the device.

    The recorded step restores the old weights and state, and the compiled step still updates in place. This requires
    existing state: if an optimizer creates its state in its first step, that step's result is read from the device
    instead. Counters on the host, such as the step counts of Adagrad and Adafactor, also count skipped steps.

    Args:
        is_finite: Returns whether the step is finite: a bool tensor [1] on the device.
        optimizer: The optimizer; its updates are skipped through step hooks.
        runtime: The optimizer's runtime.
    """
    has_state, old = bool(optimizer.state), list[torch.Tensor]()

    def tensors() -> list[torch.Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [tensor for weight in parameters for tensor in (weight, *state_on_device(optimizer, weight))]

    def before_update(*_: object) -> None:
        nonlocal has_state
        if has_state:
            old[:] = [tensor.detach().clone() for tensor in tensors()]
        elif runtime.fetch([is_finite()])[0].all():
            has_state = True
        else:
            optimizer.zero_grad(set_to_none=True)  # torch's optimizers skip parameters without a gradient

    @torch.no_grad()
    def after_update(*_: object) -> None:
        for tensor, value in zip(tensors() if old else (), old, strict=True):
            tensor.copy_(torch.where(is_finite()[0], tensor, value.to(tensor.dtype)))
        old.clear()

    optimizer.register_step_pre_hook(before_update)
    optimizer.register_step_post_hook(after_update)


def state_on_device(optimizer: Optimizer, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the state tensors of ``parameter`` that are on its device. A step count may be on the host."""
    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, torch.Tensor) and value.device == parameter.device:
            yield value


def _lay_out_new_state(optimizer: Optimizer, runtime: Runtime, specs: Mapping[Any, PartitionSpec]) -> None:
    """Shard the state that step 1 creates, before that step is executed."""
    logger.warning(
        f"{type(optimizer).__name__} creates its state in step 1, so steps 1 and 2 are compiled separately. "
        "Adam and AdamW compile once."
    )

    is_new = [True]  # a hook cannot remove itself while hooks are called

    def pack_rows(*_: object) -> None:
        if not is_new:
            return
        is_new.clear()
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and parameter in specs:
                    state[name] = runtime.constrain(value, specs[parameter])

    optimizer.register_step_post_hook(pack_rows)


def _replace_rates(optimizer: Optimizer, replacement: Callable[[Any], Any]) -> None:
    """Replace the groups' learning rates during each step, to keep a new rate from changing the program.

    Schedulers, logs and checkpoints still see plain floats.
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


def create_schedule(args: RewardConfig, optimizer: Any, num_training_steps: int) -> Any:
    """Create the learning rate schedule of the settings, and try its first and last step, and the end of its warm-up.

    Raises:
        UserError: The settings make no schedule, or one that cannot compute a rate, or an initial learning rate of the
            optimizer is not above `learning_rate_end`.
    """
    (name, arguments), warmup = args.schedule, args.get_warmup_steps(num_training_steps)
    groups, end = (optimizer.defaults, *optimizer.param_groups), args.learning_rate_end
    if end is not None and (rate := min(group["lr"] for group in groups)) <= end:
        raise UserError(
            f"learning_rate_end={end} must be below every learning rate of the optimizer, but one is {rate}. Lower "
            "learning_rate_end, or raise that rate."
        )
    if name == SchedulerType.POLYNOMIAL:  # it divides by the number of steps after the warm-up
        num_training_steps = max(num_training_steps, warmup + 1)
    what = f"lr_scheduler_type={name.value!r} with lr_scheduler_kwargs={arguments}"
    with explaining(f"{what} cannot compute learning rates", "Correct lr_scheduler_kwargs."):
        schedule = get_scheduler(name, optimizer, warmup, num_training_steps, arguments)
        for factor_at in getattr(schedule, "lr_lambdas", ()):
            _ = [factor_at(step) for step in (0, warmup, num_training_steps)]
    return schedule


def unwrap(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
