"""The step over plain values, without a trainer: the forward and the loss of a batch.

`RewardTrainer.compute_loss` calls `training_step`, and so can a loop of your own, which calls `backward` on its loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..modeling.forward import rewards_of
from ..modeling.losses import Loss
from ..packing.batch import WEIGHTS, Batch, Comparisons
from ..runtime import current


@dataclass(frozen=True)
class StepResult:
    """Loss and rewards of a batch, on the device."""

    loss: torch.Tensor
    """The loss of the batch; of a micro-batch its share, so that the shares add up to it."""
    losses_P: torch.Tensor
    """The weighted loss of each row of the data; 0 for padding."""
    rewards_SA: torch.Tensor
    """Rewards, float32 or wider; arbitrary for padding."""
    tokens_S: torch.Tensor
    """Tokens that each reward adds, as if no prompt were shared; 0 for padding."""
    table: Comparisons[torch.Tensor]
    outputs: Any = None
    """The model's own outputs, of padded rows."""

    @property
    def is_there_P(self) -> torch.Tensor:
        """Mask of the real rows of the data, [P]."""
        return self.tokens_S.unflatten(0, (-1, self.table.answers)).sum(-1) > 0

    @property
    def rewards_by_row(self) -> torch.Tensor:
        """The rewards by row of the data: [P, K], or [P, A, K] of several attributes."""
        rewards_PAK = self.rewards_SA.unflatten(0, (-1, self.table.answers)).transpose(1, 2)
        return rewards_PAK.squeeze(1) if rewards_PAK.shape[1] == 1 else rewards_PAK

    def detach(self) -> "StepResult":
        """Return a copy that keeps no graph alive."""
        loss, losses_P, rewards_SA = self.loss.detach(), self.losses_P.detach(), self.rewards_SA.detach()
        return StepResult(loss, losses_P, rewards_SA, self.tokens_S, self.table)


def training_step(model: nn.Module, batches: Sequence[Batch[torch.Tensor]], loss: Loss, **extras: Any) -> StepResult:
    """Compute the loss of a batch, or of one of its micro-batches, for a backward.

    Without gradients each of several micro-batches is executed on its own: the same program wherever it comes.

    Args:
        model: Called as a whole, so whatever wraps it takes part.
        batches: The micro-batches, on the model's device.
        loss: The loss, with its settings.
        extras: Passed on to the model.
    """
    compute, parts = current().compiled(_compute), []
    for batch in batches:
        parts.append(compute(model, batch, loss, extras))
        if len(batches) > 1 and not torch.is_grad_enabled():
            current().step_boundary()
    return parts[0] if len(parts) == 1 else _joined(parts)


evaluation_step = torch.no_grad()(training_step)
"""Computes the same, without gradients."""


def _compute(model: nn.Module, batch: Batch[torch.Tensor], loss: Loss, extras: dict[str, Any]) -> StepResult:
    rewards_SA, outputs = rewards_of(model, batch, **extras)
    losses_P = loss.per_row(rewards_SA, batch.table)
    total = losses_P.sum() / batch.table.weight_sum_1.squeeze()
    return StepResult(total, losses_P, rewards_SA, batch.tokens_S, batch.table, outputs)


def _joined(parts: Sequence[StepResult]) -> StepResult:
    """Join the results of micro-batches, which have some of the batch's rows each."""
    tables = [part.table for part in parts]
    whole: dict[str, Any] = {name: torch.stack([getattr(table, name) for table in tables]).sum(0) for name in WEIGHTS}
    rewards = [torch.where(part.tokens_S[:, None] > 0, part.rewards_SA, 0.0) for part in parts]
    return StepResult(
        torch.stack([part.loss for part in parts]).sum(),
        torch.stack([part.losses_P for part in parts]).sum(0),
        torch.stack(rewards).sum(0),
        torch.stack([part.tokens_S for part in parts]).sum(0, dtype=torch.int32),
        replace(tables[0], **whole),
    )
