"""What is added up between two logs (losses, metrics, steps that are not finite): logged, saved, resumed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from ..parallel.chips import GiB
from ..runtime import Runtime
from .agreement import over_processes
from .metrics import RewardMetrics
from .nonfinite import Counted, NonfiniteGuard


class LogInterval:
    """Adds up on the device what the next log says, and reads it by one stop of the device.

    Args:
        metrics: Beside the loss.
        nonfinite: Leaves steps out.
    """

    def __init__(
        self,
        runtime: Runtime,
        device: torch.device,
        accelerator: Accelerator,
        metrics: RewardMetrics,
        nonfinite: NonfiniteGuard,
    ) -> None:
        self._runtime, self._device, self._accelerator = runtime, device, accelerator
        self._metrics, self._nonfinite = metrics, nonfinite

    def start(self, step: int, parts: Sequence[Mapping[str, Any]]) -> tuple[torch.Tensor, float]:
        """Begin a run, or go on after ``step`` where each of the saving processes was between two logs.

        Returns:
            The open sum of losses on the device, [1], and on the host.
        """
        index, count = self._accelerator.process_index, self._accelerator.num_processes
        self._nonfinite.start()
        self._metrics.start(step, [part["metrics"] for part in parts], index, count)
        loss_sum_1 = self._nonfinite.start_loss_sum()
        if not parts:
            return loss_sum_1, 0.0
        own = [parts[index]] if len(parts) == count else parts  # another number of processes goes on from the mean
        loss_sum = sum(part["open_loss"] for part in own) / len(own)
        self._nonfinite.load_state_dict(own[0]["nonfinite"])
        return self._runtime.to_device(torch.tensor([loss_sum]), self._device), loss_sum

    def state(self, loss_sum_1: torch.Tensor) -> list[dict[str, Any]]:
        """Return what each of accelerate's processes has added up since the last log: the parts for `start`."""
        (loss,) = self._runtime.fetch([loss_sum_1])
        own = {
            "metrics": self._metrics.state_dict(),
            "open_loss": loss.sum().item(),
            "nonfinite": self._nonfinite.state_dict(),
        }
        return over_processes(self._accelerator, own)

    def close(
        self,
        loss_sum_1: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        learning_rate: float,
        step: int,
        steps: int,
    ) -> tuple[dict[str, float], float, Counted]:
        """Read what was added up since the last log, ``steps`` before ``step``, and start anew.

        Args:
            grad_norm: Of the last step; None after an epoch without a step.

        Returns:
            What is logged, the sum of the interval's losses, and its steps.
        """
        norm = grad_norm if isinstance(grad_norm, torch.Tensor) else torch.tensor(float(grad_norm or 0.0))
        own = [loss_sum_1, norm, self._nonfinite.device_counts, *self._metrics.device_sums]
        loss, norm, counts, *sums = self._runtime.fetch(own)
        everyone = over_processes(self._accelerator, (loss.item(), sums))
        loss_sum = sum(loss for loss, _ in everyone) / len(everyone)
        counted = self._nonfinite.close(counts)
        finite = steps - counted.nonfinite
        logs = {"loss": loss_sum / finite} if finite else {}
        if grad_norm is not None and not counted.in_a_row:
            logs["grad_norm"] = norm.item()
        logs["learning_rate"] = learning_rate
        logs |= self._metrics.close([sums for _, sums in everyone], step)
        if self._runtime.plans_shapes:
            logs["compiled_programs"] = self._runtime.compile_count()
        if (memory := self._runtime.most_memory(self._device)) is not None:
            logs["memory_gib"] = memory / GiB
        if self._nonfinite.is_on:
            logs["nonfinite"] = counted.nonfinite
        return logs, loss_sum, counted
