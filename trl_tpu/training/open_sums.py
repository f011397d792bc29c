"""What is added up between two logs, and what is logged of it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..runtime import Runtime
from .metrics import RewardMetrics, RewardSums, on_host, over_processes
from .nonfinite import Counted, NonfiniteGuard


class Closed(NamedTuple):
    """What was added up since the last log, of all processes."""

    logs: dict[str, float]
    loss_sum: float
    steps: Counted


class OpenSums:
    """What is added up between two logs: the loss, rewards and tokens, steps that are not finite."""

    def __init__(
        self, runtime: Runtime, metrics: RewardMetrics, nonfinite: NonfiniteGuard, accelerator: Accelerator
    ) -> None:
        self._runtime, self._metrics, self._nonfinite, self._accelerator = runtime, metrics, nonfinite, accelerator

    def close(
        self, loss_sum_1: torch.Tensor, grad_norm: torch.Tensor | float | None, learning_rate: float, steps: int
    ) -> Closed:
        """Read what was added up over ``steps`` steps, by one stop of the device, and start anew.

        Args:
            grad_norm: Of the last step; None at the end of an epoch that was cut short.
        """
        self._runtime.step_boundary()
        norm = grad_norm if isinstance(grad_norm, torch.Tensor) else torch.tensor(float(grad_norm or 0.0))
        on_device = [loss_sum_1, norm, self._nonfinite.device_counts, *self._metrics.device_sums]
        loss, norm, counts, *sums = self._runtime.fetch(on_device)
        reward_sums, loss_sum = over_processes(self._accelerator, on_host(sums), loss.item())
        counted = self._nonfinite.close(counts)
        finite = steps - counted.nonfinite
        logs = {"loss": loss_sum / finite} if finite else {}
        if grad_norm is not None and not counted.in_a_row:
            logs["grad_norm"] = norm.item()
        logs |= {"learning_rate": learning_rate, **self._metrics.close(reward_sums)}
        if self._nonfinite.is_on:
            logs["nonfinite"] = counted.nonfinite
        return Closed(logs, loss_sum, counted)

    def state_dict(self, loss_sum_1: torch.Tensor) -> list[dict[str, Any]]:
        """Return what each of accelerate's processes has added up (on XLA there is one)."""
        (loss,) = self._runtime.fetch([loss_sum_1])
        own = {
            "metrics": self._metrics.state_dict(),
            "open_loss": loss.sum().item(),
            "nonfinite": self._nonfinite.state_dict(),
        }
        return gather_object([own]) if self._accelerator.num_processes > 1 else [own]

    def load_state_dict(self, parts: Sequence[Mapping[str, Any]]) -> float:
        """Go on from what each process had added up; returns the loss so far."""
        own = _own_part(parts, self._accelerator.process_index, self._accelerator.num_processes)
        self._metrics.load_state_dict(own["metrics"])
        self._nonfinite.load_state_dict(own["nonfinite"])
        return own["open_loss"]


def _own_part(parts: Sequence[Mapping[str, Any]], index: int, count: int) -> Mapping[str, Any]:
    """Return what process ``index`` of ``count`` goes on from, given what each had added up at the save.

    Where their number has changed, the first process takes all sums, and each the mean loss.
    """
    if len(parts) == count:
        return parts[index]
    sums = [RewardSums(**part["metrics"]["open"]) for part in parts] if index == 0 else []
    loss = sum(part["open_loss"] for part in parts) / len(parts)
    metrics = parts[0]["metrics"] | {"open": vars(sum(sums, RewardSums()))}
    return dict(parts[0]) | {"metrics": metrics, "open_loss": loss}
