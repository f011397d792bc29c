"""Steps whose loss or gradient is NaN or infinite: counted on the device, and their updates not taken.

Nothing here reads the device within a step on XLA: a step that is finite and one that is not are the same program, in
which every new value of weights and optimizer state is chosen over the old one, or is not. On TorchTPU Adam's kernel
leaves the update out. Plain torch, and TorchTPU with another optimizer, read before the update instead, and so need no
second copy of the state.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from ..runtime import Runtime
from .optimizer import bare, is_fused, state_on_device


@dataclass(frozen=True)
class Counted:
    """Steps since the last log, on the host."""

    taken: int
    nonfinite: int
    in_a_row: int  # how many of the last steps, those before the last log among them
    reached_at: int  # the step, the first being 1, at which `in_a_row` reached the limit; 0 if it did not


def computes_in_float16(args: Any, model: nn.Module) -> bool:
    """Return whether steps that are not finite are ordinary: a loss scale skips them, and finds its size by them."""
    return args.mixed_precision == "fp16" or any(each.dtype == torch.float16 for each in model.parameters())


class NonfiniteGuard:
    """Leaves out the update of a step whose loss or gradient is not finite, and counts such steps in a row.

    The step counts as one for everything else: the learning rate's schedule, logs, saves. The sum of the losses is as
    if it had not been. Nothing is read from the device before a log.

    Args:
        limit: How many such steps in a row are too many; 0 turns all of it off.
    """

    device_counts: torch.Tensor
    """What `close` reads, int32."""

    def __init__(self, limit: int, runtime: Runtime, device: torch.device, accelerator: Accelerator) -> None:
        self.limit = limit
        self._runtime, self._device, self._accelerator = runtime, device, accelerator
        self.start()

    @property
    def is_on(self) -> bool:
        """Whether steps are counted and skipped."""
        return self.limit > 0

    def start(self) -> None:
        """Begin a run."""
        self.total = 0  # nonfinite steps of this run up to the last log
        self._seen_1 = self._finite_1 = self._to_device(torch.ones(1, dtype=torch.bool))
        self._has_begun = False
        self._load(0, 0, 0, 0)

    def start_loss_sum(self) -> torch.Tensor:
        """Return a sum of losses to begin with, [1]: XLA would bake a scalar 0 into the next step's program."""
        self._sum_before_1, self._known_sum = (self._to_device(torch.zeros(1)) for _ in range(2))
        return self._known_sum

    def begin(self, loss_sum_1: torch.Tensor) -> None:
        """Begin a step, if none has begun. Its sum of losses is that after it, too, if it is not finite.

        `start_loss_sum` and the step before provide it; whatever else sets it, as resuming may, costs an execution.
        """
        if not self._has_begun and loss_sum_1 is not self._known_sum:
            self._sum_before_1, self._known_sum = loss_sum_1.clone(), loss_sum_1
        self._has_begun = True

    @torch.no_grad()
    def see(self, loss: torch.Tensor) -> None:
        """Note the loss, a scalar, of one of the step's micro-batches."""
        self._seen_1 = self._seen_1 & torch.isfinite(loss).all()

    @torch.no_grad()
    def end_step(self, gradient_norm: torch.Tensor | float, loss_sum_1: torch.Tensor, optimizer: Any) -> torch.Tensor:
        """Judge the step, whose update comes next, by its losses and the norm of its gradient.

        Returns:
            The sum of the losses, without this step's if it is not finite.
        """
        finite_1 = self._seen_1 & torch.isfinite(torch.as_tensor(gradient_norm, device=self._device))
        self._seen_1, self._has_begun = torch.ones_like(finite_1), False
        if self._accelerator.num_processes > 1:  # each has a loss of its own
            finite_1 = self._accelerator.reduce((~finite_1).int()) == 0
        self._count(finite_1)
        self._sum_before_1 = torch.where(finite_1, loss_sum_1, self._sum_before_1)
        self._known_sum = self._sum_before_1.clone()  # the loop adds to it in place
        if not self._runtime.records_steps:
            self._skip_before(bare(optimizer))
        return self._known_sum

    def _count(self, finite_1: torch.Tensor) -> None:
        self._finite_1 = finite_1
        failed = (~finite_1[0]).int()
        taken, nonfinite, in_a_row, reached_at = self.device_counts.unbind()
        taken, nonfinite, in_a_row = taken + 1, nonfinite + failed, (in_a_row + 1) * failed
        reached_at = torch.where((reached_at == 0) & (in_a_row >= self.limit), taken, reached_at)
        self.device_counts = torch.stack([taken, nonfinite, in_a_row, reached_at])

    def _skip_before(self, optimizer: Any) -> None:
        """Let the coming update be none, if the step is not finite: by what the device finds, where that can be."""
        if self._runtime.plans_shapes and is_fused(optimizer):
            optimizer.found_inf = (~self._finite_1[0]).float()  # what torch's loss scaling tells such a kernel
        elif not self._finite_1:
            drop_gradients(optimizer)

    def skip_on_device(self, optimizer: Optimizer) -> None:
        """Skip updates of ``optimizer`` where the step is not finite, without reading whether it is.

        Old values of weights and state live only within the recorded step, so that the compiled one still updates in
        place. This needs the state beforehand: if an optimizer makes it in its first step, that step is read instead.
        What an optimizer counts on the host, as Adagrad and Adafactor do their steps, goes on counting.
        """
        if self.is_on:
            self._has_stepped = bool(optimizer.state)
            self._old: list[tuple[torch.Tensor, torch.Tensor]] = []
            optimizer.register_step_pre_hook(self._before_update)
            optimizer.register_step_post_hook(self._after_update)

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        if self._has_stepped:
            self._old = [(tensor, tensor.detach().clone()) for tensor in _tensors(optimizer)]
        elif self._runtime.fetch([self._finite_1])[0].all():
            self._has_stepped = True
        else:
            drop_gradients(optimizer)

    @torch.no_grad()
    def _after_update(self, *_: object) -> None:
        finite = self._finite_1[0]
        for tensor, old in self._old:
            tensor.copy_(torch.where(finite, tensor, old))
        self._old = []

    def explain(self, first: int, last: int, rows: Sequence[int] | None, weights: str) -> str:
        """Return what to say at a stop.

        Args:
            rows: Of the training dataset, whose pairs were in step ``first``; None if unknown.
            weights: Where they are, in a few words.
        """
        named = "not known by their rows" if rows is None else f"rows {rows[:16]} of the trainer's train_dataset"
        return (
            f"The loss or the gradient of {self.limit} steps in a row, {first} to {last}, was NaN or infinite "
            f"(nonfinite_limit={self.limit}). No update was taken from them: the weights are those after step "
            f"{first - 1} ({weights}). The pairs of step {first} are {named}. Look for faults in them and in the "
            "model's own weights, or lower learning_rate; nonfinite_limit=0 trains on without these checks."
        )

    def close(self, fetched: torch.Tensor) -> Counted:
        """Read fetched `device_counts`, and count the steps up to the next log anew."""
        counted = Counted(*fetched.tolist())
        self.total += counted.nonfinite
        # after a stop a resumed run begins a row of its own
        self._load(0, 0, 0 if counted.reached_at else counted.in_a_row, 0)
        return counted

    def state_dict(self) -> dict[str, int]:
        """Return what a resumed run needs to count the same."""
        return vars(Counted(*self._runtime.fetch([self.device_counts])[0].tolist()))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._load(*vars(Counted(**state)).values())
        self.total = -state["nonfinite"]  # they were in steps before the resume

    def _load(self, *counts: int) -> None:
        self.device_counts = self._to_device(torch.tensor(counts, dtype=torch.int32))

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._runtime.to_device(tensor, self._device)


def drop_gradients(optimizer: Optimizer) -> None:
    """Let the coming step do nothing: torch's optimizers pass over parameters without a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the weights, and what of their state is on their device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            yield from state_on_device(optimizer, parameter)
