"""Evaluated batches: rewards stay on the device until the end, and every pair counts once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..runtime import Runtime


class EvaluatedPairs:
    """Collects device tensors of evaluated batches: losses [P], rewards [P, 2], predictions [P, ...], masks [P]."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._batches: list[list[torch.Tensor]] = []

    def add(self, batch: Sequence[torch.Tensor]) -> None:
        """Add the losses, rewards, predictions and int masks of one batch."""
        self._batches.append([self._runtime.replicate(tensor) for tensor in batch])

    def fetch_last(self) -> tuple[torch.Tensor, np.ndarray]:
        """Return the losses [N] and predictions [N, ...] of the last batch's real pairs."""
        losses_P, _, predictions_P, mask_P = self._runtime.fetch(self._batches[-1])
        mask_P = mask_P.bool()
        return losses_P[mask_P], predictions_P[mask_P].float().numpy()

    def fetch(self) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Return losses [N] in float64, rewards [N, 2] and predictions [N, ...] of all real pairs, in order."""
        host = self._runtime.fetch([tensor for batch in self._batches for tensor in batch])
        batches = [host[start : start + 4] for start in range(0, len(host), 4)]
        if not batches:
            return torch.zeros(0), torch.zeros(0, 2), np.zeros((0, 2), dtype=np.float32)
        losses_N, rewards_N2, predictions_N = (
            torch.cat([batch[part][batch[3].bool()] for batch in batches]) for part in range(3)
        )
        return losses_N.double(), rewards_N2, predictions_N.float().numpy()


def model_for_evaluation(
    model: nn.Module, optimizer: Any, dtype: torch.dtype | None, device: torch.device
) -> nn.Module:
    """Return ``model`` in evaluation mode, and in ``dtype`` if one is asked for; the optimizer may have a mode too."""
    if dtype is not None:
        model = model.to(dtype=dtype, device=device)
    model.eval()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return model
