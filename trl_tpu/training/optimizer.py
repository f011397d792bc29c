"""Keep every training step the same program: optimizer state, learning rate and gradients as data on the device.

XLA compiles a program for each distinct recorded step. A step changes when state appears in it (Adam's moments are
made in step 1), when a number is baked in (torch_xla does so with 0 and 1, and uploads any other), or when gradients
are sometimes absent. Each function here removes one of these; on plain torch they are harmless and unused.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop
from transformers.optimization import Adafactor

from ..errors import UserError
from ..parallel.shard import zeros_laid_out_like
from ..runtime import PartitionSpec, Runtime

logger = logging.getLogger(__name__)

# torch's capturable Adam divides by the learning rate, so that 0 makes NaN of a parameter whose gradient was always 0.
# This rate moves nothing: its product with any update is far below what float32 resolves beside a weight. (It is no
# number that anybody writes, as Adafactor's eps of 1e-30: torch_xla uploads equal numbers as one.)
_SMALLEST_RATE = 1.1e-30
_ALMOST_1 = 1 - 2**-24  # the float32 before 1

# These compute with a learning rate that is a tensor; others of torch would read it from the device.
_RATE_IS_DATA = (Adam, Adamax, NAdam, RAdam)

#: The mesh axes that the dimensions of each parameter go over.
ParameterSpecs = Mapping[Any, PartitionSpec]


def prepare_optimizer(optimizer: Optimizer, runtime: Runtime, specs: ParameterSpecs) -> None:
    """Create the optimizer's state before the first step, laid out like its parameters, and its learning rate as data.

    An optimizer that is not known here makes its state itself in step 1, where it is laid out too: one more program.

    Args:
        optimizer: Over parameters on the device.
        runtime: Theirs.
        specs: The mesh axes of the parameters' dimensions; a parameter that is not in it is whole on every device.

    Raises:
        UserError: For an optimizer that would read every parameter from the device in each step.
    """
    if isinstance(optimizer, Adafactor):
        _check_adafactor(optimizer)
        optimizer.register_step_post_hook(_drop_sizes)
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    if isinstance(optimizer, _RATE_IS_DATA):
        _feed_learning_rate(optimizer, runtime)
    else:
        _keep_rates_from_0_and_1(optimizer)
    _let_state_wait(optimizer, runtime)
    if not _create_state(optimizer, runtime, specs):
        _lay_out_new_state(optimizer, runtime, specs)
    runtime.step_boundary()


# ---- state


def _create_state(optimizer: Optimizer, runtime: Runtime, specs: ParameterSpecs) -> bool:
    """Make the state of every parameter; False, and none, where an optimizer's first step is like no other."""
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = _first_state(optimizer, group, parameter, runtime, specs.get(parameter))
            if state is None:
                return False
            if state:
                states[parameter] = state
    if states and "capturable" in optimizer.defaults:
        steps = runtime.to_device(torch.zeros(len(states)), next(iter(states)).device).unbind()
        for state, step in zip(states.values(), steps, strict=True):
            state["step"] = step.clone()
    for parameter, state in states.items():
        optimizer.state[parameter] = state
    return True


def _first_state(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    runtime: Runtime,
    spec: PartitionSpec | None,
) -> dict[str, Any] | None:
    """Return what the optimizer itself would begin with, but for the count of steps of capturable ones."""

    def zeros() -> torch.Tensor:
        return zeros_laid_out_like(parameter)

    if isinstance(optimizer, Adam):  # AdamW is one
        return {name: zeros() for name in ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * group["amsgrad"])}
    if isinstance(optimizer, SGD):
        if group["momentum"] and group["dampening"]:
            return None  # the first step does not dampen
        return {"momentum_buffer": zeros()} if group["momentum"] else {}
    if isinstance(optimizer, Adagrad):
        return {"step": torch.tensor(0.0), "sum": zeros() + group["initial_accumulator_value"]}
    if isinstance(optimizer, RMSprop):
        extra = ["momentum_buffer"] * (group["momentum"] > 0) + ["grad_avg"] * group["centered"]
        return {name: zeros() for name in ("square_avg", *extra)}
    if isinstance(optimizer, Adafactor):
        # its first decay, 1 - step ** -0.8, would be exactly 0 at step 1; here it is 1e-15
        state: dict[str, Any] = {"step": 1e-15, "RMS": 0}
        if group["beta1"] is not None:
            state["exp_avg"] = zeros()
        if parameter.dim() < 2:
            return state | {"exp_avg_sq": zeros()}
        rows, columns = zeros().sum(dim=-1), zeros().sum(dim=-2)
        if spec is not None:
            rows = runtime.constrain(rows, spec[:-1])
            columns = runtime.constrain(columns, (*spec[:-2], spec[-1]))
        return state | {"exp_avg_sq_row": rows, "exp_avg_sq_col": columns}
    return None


def _let_state_wait(optimizer: Optimizer, runtime: Runtime) -> None:
    """Let each step touch a parameter's state only when its gradient is there.

    libtpu copies state whose layout is not that of the gradient, as of an embedding table. Left alone, it does so when
    a step begins, and holds the copies until it ends.
    """

    def wait(*_: object) -> None:
        for parameter in optimizer.state:
            if parameter.grad is not None:
                state = state_on_device(optimizer, parameter)
                runtime.optimization_barrier(
                    [parameter.grad, *(each for each in state if each.shape == parameter.shape)]
                )

    optimizer.register_step_pre_hook(wait)


def state_on_device(optimizer: Optimizer, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors of the state of ``parameter`` that are where it is; a count of steps may be on the host."""
    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, torch.Tensor) and value.device == parameter.device:
            yield value


def _lay_out_new_state(optimizer: Optimizer, runtime: Runtime, specs: ParameterSpecs) -> None:
    """Lay the state that the first step makes out before that step is executed."""
    logger.warning(
        f"{type(optimizer).__name__} makes its state in its first step, so steps 1 and 2 are compiled separately. "
        "Adam, AdamW, SGD (without dampening), RMSprop, Adagrad and transformers' Adafactor compile once."
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


def _check_adafactor(optimizer: Adafactor) -> None:
    if any(group["scale_parameter"] for group in optimizer.param_groups):
        raise UserError(
            "Adafactor with scale_parameter=True chooses its step by comparing each parameter's size on the host, "
            "which stops an XLA device for every parameter of every step. Use scale_parameter=False and a learning "
            "rate, as optim='adafactor' does, or train on plain torch with USE_TORCH_XLA=0."
        )


def _drop_sizes(optimizer: Optimizer, *_: object) -> None:
    """Forget the parameters' sizes, which nothing reads; kept, they make another program of the second step."""
    for state in optimizer.state.values():
        state["RMS"] = 0


# ---- learning rate


def _keep_rates_from_0_and_1(optimizer: Optimizer) -> None:
    """For the duration of each step, no learning rate is a number that torch_xla would bake into the program."""
    rates: list[float] = []

    def nudge(*_: object) -> None:
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if group["lr"] is not None:
                group["lr"] = {0: _SMALLEST_RATE, 1: _ALMOST_1}.get(group["lr"], group["lr"])

    def restore(*_: object) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(nudge)
    optimizer.register_step_post_hook(restore)


def _feed_learning_rate(optimizer: Optimizer, runtime: Runtime) -> None:
    """For the duration of each step, the groups' learning rates are device data; around it they are plain floats.

    So schedulers, logs and checkpoints see floats, and no value of the rate changes the program.
    """
    host_rates: list[float] = []
    device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])

    def to_device(*_: object) -> None:
        host_rates[:] = [group["lr"] for group in optimizer.param_groups]
        on_device = {
            rate: runtime.to_device(torch.tensor([max(rate, _SMALLEST_RATE)]), device)[0] for rate in set(host_rates)
        }
        for group in optimizer.param_groups:
            group["lr"] = on_device[group["lr"]]

    def to_host(*_: object) -> None:
        for group, rate in zip(optimizer.param_groups, host_rates, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(to_device)
    optimizer.register_step_post_hook(to_host)


def bare(optimizer: Any) -> Optimizer:
    """Return torch's optimizer, which accelerate wraps."""
    return getattr(optimizer, "optimizer", optimizer)


class StepState:
    """What every step of a run finds on an XLA device from the first on: optimizer state and gradients.

    Args:
        accumulates: Whether gradients of several micro-batches add up.
    """

    def __init__(self, runtime: Runtime, accumulates: bool) -> None:
        self._runtime, self._accumulates = runtime, accumulates
        self._optimizer: Optimizer | None = None
        self.gradient_buffers: dict[torch.nn.Parameter, torch.Tensor] = {}

    def prepare(self, optimizer: Optimizer, specs: ParameterSpecs) -> bool:
        """Prepare ``optimizer`` as `prepare_optimizer` does, once; returns whether it was new."""
        if optimizer is self._optimizer:
            return False
        self._optimizer = optimizer
        prepare_optimizer(optimizer, self._runtime, specs)
        if self._accumulates:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.gradient_buffers = {parameter: zeros_laid_out_like(parameter) for parameter in parameters}
            self._runtime.step_boundary()
            optimizer.register_step_post_hook(self._zero)
        return True

    def attach_gradients(self) -> None:
        """Put a zeroed buffer where a gradient is missing, so that the first micro-batch is no program of its own."""
        for parameter, buffer in self.gradient_buffers.items():
            if parameter.grad is None:
                parameter.grad = buffer

    def _zero(self, *_: object) -> None:
        for buffer in self.gradient_buffers.values():
            buffer.zero_()
