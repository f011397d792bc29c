"""A step over plain values: a model, a batch of pairs in any layout and the loss's settings, without a trainer.

`RewardTrainer.compute_loss` calls it, and so can a loop of your own, which calls `backward` on the loss it returns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..data.packed_batch import micro_batches_of
from ..modeling.losses import pairwise_losses
from ..modeling.rewards import OWN_KEYS, read_batch
from ..runtime import current


@dataclass(frozen=True)
class LossSettings:
    """What the loss of pairs depends on beside the model and the batch.

    Args:
        pad_token_id: What padded rows are padded with.
        padding_side: On which side they are.
        center_rewards_coefficient: As in `pairwise_losses`.
    """

    pad_token_id: int
    padding_side: str = "right"
    center_rewards_coefficient: float | None = None


@dataclass(frozen=True)
class StepResult:
    """What a step computed of the P pairs of a batch, on the device."""

    loss: torch.Tensor
    """The mean over the batch's real pairs; of one of several micro-batches its part, which add up to it."""
    losses_P: torch.Tensor
    rewards_P2: torch.Tensor
    """Of the chosen and the rejected dialogue, float32."""
    mask_P: torch.Tensor
    """True for the pairs that were computed and are no filling."""
    tokens: torch.Tensor
    """How many tokens these pairs' dialogues have: an int32 scalar."""
    outputs: Any = None
    """The model's, where a row is a dialogue."""

    def detach(self) -> "StepResult":
        """Return what can be kept without keeping a graph alive."""
        loss, losses_P, rewards_P2 = self.loss.detach(), self.losses_P.detach(), self.rewards_P2.detach()
        return StepResult(loss, losses_P, rewards_P2, self.mask_P, self.tokens)


def training_step(model: nn.Module, batch: dict[str, Any], settings: LossSettings, **extras: Any) -> StepResult:
    """Compute the loss of a batch, or of one of its micro-batches, for a backward.

    Without gradients each of several micro-batches is executed on its own, the same program wherever it comes.

    Args:
        model: Called as a whole, so whatever wraps it takes part.
        batch: As a collator makes it, on the model's device.
        extras: Handed on to the model, as what else the batch has.
    """
    micro_batches, compute = micro_batches_of(batch), current().compiled(_compute)
    parts = []
    for rows in micro_batches:
        parts.append(compute(model, rows, settings, extras))
        if len(micro_batches) > 1 and not torch.is_grad_enabled():
            current().step_boundary()
    return _join(parts)


evaluation_step = torch.no_grad()(training_step)
"""Computes the same, without gradients."""


def _compute(model: nn.Module, rows: dict[str, Any], settings: LossSettings, extras: dict[str, Any]) -> StepResult:
    pairs = read_batch(rows, settings.pad_token_id, settings.padding_side)
    others = {key: value for key, value in rows.items() if key not in OWN_KEYS}
    rewards_P2, outputs = pairs.rewards(model, **others | extras)
    losses_P = pairwise_losses(rewards_P2, pairs.margin_P, settings.center_rewards_coefficient)
    return StepResult(pairs.mean(losses_P), losses_P, rewards_P2, pairs.mask_P, pairs.tokens, outputs)


def _join(parts: Sequence[StepResult]) -> StepResult:
    """Return what was computed of a batch whose micro-batches have some of its pairs each."""
    if len(parts) == 1:
        return parts[0]

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([getattr(part, name) for part in parts])

    loss, tokens, masks_MP = stacked("loss").sum(), stacked("tokens").sum(dtype=torch.int32), stacked("mask_P")
    losses_P = torch.where(masks_MP, stacked("losses_P"), 0.0).sum(0)
    rewards_P2 = torch.where(masks_MP[..., None], stacked("rewards_P2"), 0.0).sum(0)
    return StepResult(loss, losses_P, rewards_P2, masks_MP.any(0), tokens)
