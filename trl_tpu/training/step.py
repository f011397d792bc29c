"""Keep every training step the same program: optimizer state, learning rate and gradients as data on the device.

XLA compiles a program for each distinct recorded step. A step changes when state appears in it (Adam's moments are
made in step 1), when a number is baked in (a learning rate of exactly 0 or 1), or when gradients are sometimes absent.
Each function here removes one of these; on plain torch they are harmless and unused.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ..runtime import Runtime

# torch's capturable Adam divides by the learning rate, so that 0 makes NaN of a parameter whose gradient was always 0.
# This rate moves nothing: its product with any update is far below what float32 resolves beside a weight.
_SMALLEST_RATE = 1e-30


def prepare_optimizer(optimizer: Optimizer, runtime: Runtime) -> None:
    """Create Adam's state before the first step, laid out like its parameters, and feed the learning rate as data.

    Optimizers without torch's ``capturable`` option keep their own ways: they work, with a few more compiles.
    """
    if "capturable" not in optimizer.defaults:
        return
    for group in optimizer.param_groups:
        group["capturable"] = True
    _feed_learning_rate(optimizer, runtime)
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        _create_moments(optimizer, runtime)
        runtime.step_boundary()


def _create_moments(optimizer: Optimizer, runtime: Runtime) -> None:
    parameters = [(parameter, group["amsgrad"]) for group in optimizer.param_groups for parameter in group["params"]]
    steps = runtime.upload(torch.zeros(len(parameters)), parameters[0][0].device).unbind()
    for (parameter, amsgrad), step in zip(parameters, steps, strict=True):
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if amsgrad else [])
        state = {name: _zeros_laid_out_like(parameter) for name in names}
        optimizer.state[parameter] = {"step": step.clone(), **state}


def _zeros_laid_out_like(parameter: torch.Tensor) -> torch.Tensor:
    # a product carries the parameter's sharding into the new tensor; zeros_like would come out replicated
    return (parameter.detach() * 0).nan_to_num(0.0)  # some weight may be infinite


def _feed_learning_rate(optimizer: Optimizer, runtime: Runtime) -> None:
    """For the duration of each step, the groups' learning rates are device data; around it they are plain floats.

    So schedulers, logs and checkpoints see floats, and no value of the rate changes the program.
    """
    host_rates: list[float] = []
    device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])

    def to_device(*_: object) -> None:
        host_rates[:] = [group["lr"] for group in optimizer.param_groups]
        on_device = {
            rate: runtime.upload(torch.tensor([max(rate, _SMALLEST_RATE)]), device)[0] for rate in set(host_rates)
        }
        for group in optimizer.param_groups:
            group["lr"] = on_device[group["lr"]]

    def to_host(*_: object) -> None:
        for group, rate in zip(optimizer.param_groups, host_rates, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(to_device)
    optimizer.register_step_post_hook(to_host)


class GradientBuffers:
    """Gradients that always exist while micro-batches accumulate, so that the first is no program of its own.

    ``attach`` puts a zeroed buffer where a gradient is missing; after each optimizer step the buffers are zeroed.
    """

    def __init__(self, optimizer: Optimizer, runtime: Runtime) -> None:
        parameters: Iterable[torch.nn.Parameter] = (p for group in optimizer.param_groups for p in group["params"])
        self._buffers = {parameter: _zeros_laid_out_like(parameter) for parameter in parameters}
        runtime.step_boundary()
        optimizer.register_step_post_hook(self._zero)

    def attach(self) -> None:
        for parameter, buffer in self._buffers.items():
            if parameter.grad is None:
                parameter.grad = buffer

    def _zero(self, *_: object) -> None:
        for buffer in self._buffers.values():
            buffer.zero_()


def passes_of(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """The passes of a batch, the final one last; a batch without `passes` is one."""
    return inputs.get("passes") or [inputs]
