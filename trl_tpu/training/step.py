"""A step over plain values: a model, a batch of pairs in any layout and the loss's settings, without a trainer.

`RewardTrainer.compute_loss` calls it, and so can a loop of your own, which calls `backward` on the loss it returns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..data.packed_batch import micro_batches_of
from ..modeling.losses import Loss
from ..modeling.rewards import other_inputs, read_batch
from ..runtime import current


@dataclass(frozen=True)
class LossSettings(Loss):
    """What a step depends on beside the model and the batch: the `Loss`, and how batches are padded.

    Args:
        pad_token_id: What padded rows are padded with.
        padding_side: On which side they are.
    """

    pad_token_id: int
    padding_side: str = "right"


@dataclass(frozen=True)
class StepResult:
    """What a step computed of the P pairs of a batch, or of its P prompts of K answers, on the device."""

    loss: torch.Tensor
    """The mean over the batch's real pairs; of one of several micro-batches its part, which add up to it."""
    losses_P: torch.Tensor
    rewards_PK: torch.Tensor
    """Of the chosen and the rejected dialogue, or of each answer, float32; of several attributes [P, A, K]."""
    mask_P: torch.Tensor
    """True for the pairs that were computed and are no filling."""
    tokens: torch.Tensor
    """How many tokens these pairs' dialogues have: an int32 scalar."""
    labels: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the data says of each pair, [P, ...]: see `trl_tpu.data.judgements`."""
    outputs: Any = None
    """The model's, where a row is a dialogue."""

    def detach(self) -> "StepResult":
        """Return what can be kept without keeping a graph alive."""
        loss, losses_P, rewards_PK = self.loss.detach(), self.losses_P.detach(), self.rewards_PK.detach()
        return StepResult(loss, losses_P, rewards_PK, self.mask_P, self.tokens, self.labels)


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
    rewards_PK, outputs = pairs.rewards(model, **other_inputs(rows) | extras)
    losses_P = settings.losses_of(rewards_PK, pairs.labels)
    return StepResult(pairs.mean(losses_P), losses_P, rewards_PK, pairs.mask_P, pairs.tokens, pairs.labels, outputs)


def _join(parts: Sequence[StepResult]) -> StepResult:
    """Return what was computed of a batch whose micro-batches have some of its pairs each."""
    if len(parts) == 1:
        return parts[0]

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([getattr(part, name) for part in parts])

    loss, tokens, masks_MP = stacked("loss").sum(), stacked("tokens").sum(dtype=torch.int32), stacked("mask_P")
    losses_P = torch.where(masks_MP, stacked("losses_P"), 0.0).sum(0)
    rewards_PK = torch.where(masks_MP, stacked("rewards_PK").movedim((0, 1), (-2, -1)), 0.0).sum(-2).movedim(-1, 0)
    part_P, each_P = masks_MP.int().argmax(0), torch.arange(masks_MP.shape[1], device=loss.device)
    labels = {name: torch.stack([part.labels[name] for part in parts])[part_P, each_P] for name in parts[0].labels}
    return StepResult(loss, losses_P, rewards_PK, masks_MP.any(0), tokens, labels)
