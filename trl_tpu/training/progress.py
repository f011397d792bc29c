"""What a resumed run goes on from, beside tensors: sums between two logs, the schedule's place, the order of pairs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.optim import Optimizer
from transformers.trainer import SCHEDULER_NAME

from ..checkpoint.state_dict import optimizer_numbers, write_progress
from ..runtime import Runtime
from .metrics import RewardMetrics, RewardSums
from .nonfinite import NonfiniteGuard


class OpenSums:
    """What is added up between two logs: the loss, rewards and tokens, steps that are not finite."""

    def __init__(
        self, runtime: Runtime, metrics: RewardMetrics, nonfinite: NonfiniteGuard, accelerator: Accelerator
    ) -> None:
        self._runtime, self._metrics, self._nonfinite, self._accelerator = runtime, metrics, nonfinite, accelerator

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
        own = own_part(parts, self._accelerator.process_index, self._accelerator.num_processes)
        self._metrics.load_state_dict(own["metrics"])
        self._nonfinite.load_state_dict(own["nonfinite"])
        return own["open_loss"]


def own_part(parts: Sequence[Mapping[str, Any]], index: int, count: int) -> Mapping[str, Any]:
    """Return what process ``index`` of ``count`` goes on from, given what each had added up at the save.

    Where their number has changed, the first process takes all sums, and each the mean loss.
    """
    if len(parts) == count:
        return parts[index]
    sums = [RewardSums(**part["metrics"]["open"]) for part in parts] if index == 0 else []
    loss = sum(part["open_loss"] for part in parts) / len(parts)
    metrics = parts[0]["metrics"] | {"open": vars(sum(sums, RewardSums()))}
    return dict(parts[0]) | {"metrics": metrics, "open_loss": loss}


def save_progress(
    folder: Path,
    open_sums: list[dict[str, Any]],
    logged_step: int,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any,
    layout: str,
    order: Mapping[str, Any],
) -> None:
    """Write `progress.json` and the schedule's place."""
    progress = {
        "processes": open_sums,
        "logged_step": logged_step,
        "optimizer": optimizer_numbers(optimizer, model),
        "batches": layout,
        "order": dict(order),
    }
    write_progress(folder, progress)
    torch.save(scheduler.state_dict(), folder / SCHEDULER_NAME)
