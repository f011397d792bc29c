"""Steps whose loss or gradient is NaN or infinite: counted on the device, and their updates not taken.

Nothing here reads the device within a step on XLA: a step that is finite and one that is not are the same program, in
which every new value of weights and optimizer state is chosen over the old one, or is not. Plain torch, for which
a read costs nothing, asks before the update instead, and so needs no second copy of the state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ..runtime import Runtime
from .optimizer import state_on_device


@dataclass(frozen=True)
class Counted:
    """Steps since the last log, on the host."""

    taken: int
    nonfinite: int
    in_a_row: int  # how many of the last steps, those before the last log among them
    reached_at: int  # the step, the first being 1, at which `in_a_row` reached the limit; 0 if it did not


class StepCounts:
    """Counts steps, and those that are not finite, on the device.

    `see` and `end_step` only record operations; `device_counts` is fetched with a log's other values.

    Args:
        limit: How many non-finite steps in a row are too many; with 0 nothing is counted.
    """

    def __init__(self, runtime: Runtime, device: torch.device, limit: int) -> None:
        self._runtime = runtime
        self._device = device
        self.limit = limit
        self.reset()

    def reset(self) -> None:
        """Start a run."""
        self.nonfinite = 0  # in all steps of this run up to the last log
        self._seen_1 = self.finite_1 = self._runtime.to_device(torch.ones(1, dtype=torch.bool), self._device)
        self._load(0, 0, 0, 0)

    def _load(self, *counts: int) -> None:
        self.device_counts = self._runtime.to_device(torch.tensor(counts, dtype=torch.int32), self._device)

    @torch.no_grad()
    def see(self, loss: torch.Tensor) -> None:
        """Note the loss, a scalar, of one of the step's micro-batches."""
        self._seen_1 = self._seen_1 & torch.isfinite(loss).all()

    @torch.no_grad()
    def verdict(self, gradient_norm: torch.Tensor) -> torch.Tensor:
        """Whether the losses seen in this step and the norm of its gradient are all finite, [1]."""
        finite_1 = self._seen_1 & torch.isfinite(gradient_norm)
        self._seen_1 = torch.ones_like(finite_1)
        return finite_1

    @torch.no_grad()
    def end_step(self, finite_1: torch.Tensor) -> None:
        """Count the step, which all processes have agreed about."""
        self.finite_1 = finite_1
        failed = (~finite_1[0]).int()
        taken, nonfinite, in_a_row, reached_at = self.device_counts.unbind()
        taken, nonfinite, in_a_row = taken + 1, nonfinite + failed, (in_a_row + 1) * failed
        reached_at = torch.where((reached_at == 0) & (in_a_row >= self.limit), taken, reached_at)
        self.device_counts = torch.stack([taken, nonfinite, in_a_row, reached_at])

    def close(self, fetched: torch.Tensor) -> Counted:
        """Read fetched `device_counts`, and count the steps up to the next log anew."""
        counted = Counted(*fetched.tolist())
        self.nonfinite += counted.nonfinite
        # after a stop a resumed run begins a row of its own
        self._load(0, 0, 0 if counted.reached_at else counted.in_a_row, 0)
        return counted

    def state_dict(self, fetched: torch.Tensor) -> dict[str, int]:
        """Fetched `device_counts`, which a resumed run needs to count the same."""
        return vars(Counted(*fetched.tolist()))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._load(*vars(Counted(**state)).values())
        self.nonfinite = -state["nonfinite"]  # they were in steps before the resume


class DeviceSkip:
    """Lets an optimizer's step on an XLA device come to nothing where it is not finite, without reading whether it is.

    Old values of weights and state live only within the recorded step, so that the compiled one still updates in
    place. This needs the state beforehand: of an optimizer which makes it in its first step, that step is read
    instead. What an optimizer counts on the host, as Adagrad and Adafactor do their steps, goes on counting.
    """

    def __init__(self, optimizer: Optimizer, counts: StepCounts, runtime: Runtime) -> None:
        self._counts = counts
        self._runtime = runtime
        self._has_stepped = bool(optimizer.state)
        self._old: list[tuple[torch.Tensor, torch.Tensor]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        if self._has_stepped:
            self._old = [(tensor, tensor.detach().clone()) for tensor in _tensors(optimizer)]
        elif self._runtime.fetch([self._counts.finite_1])[0].all():
            self._has_stepped = True
        else:
            drop_gradients(optimizer)

    @torch.no_grad()
    def _after(self, *_: object) -> None:
        finite = self._counts.finite_1[0]
        for tensor, old in self._old:
            tensor.copy_(torch.where(finite, tensor, old))
        self._old = []


def drop_gradients(optimizer: Optimizer) -> None:
    """Let the coming step do nothing: torch's optimizers pass over parameters without a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Weights, and of the state what is on their device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            yield from state_on_device(optimizer, parameter)
