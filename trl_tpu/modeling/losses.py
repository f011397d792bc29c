"""Losses of reward modeling, computed from rewards and their comparisons (`Loss`) or by a model (`batch_loss`).

Letters in names of tensors: P data rows, K answers per data row, A attributes, S = P K scored positions, G = P A
rankings, C comparisons. `trl_tpu.packing.batch` explains them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from ..data.kinds import TIE_MODELS
from ..packing.batch import WEIGHTS, Batch, Comparisons
from ..runtime import current
from .forward import rewards_of

#: Values of `loss_type` that read whole rankings. "sigmoid" compares two rewards.
LISTWISE_LOSSES = ("plackett_luce", "regression")


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of a batch. The arguments are settings of `RewardConfig` with the same names.

    Args:
        center_rewards_coefficient: Coefficient of a penalty, the squared sum of two compared rewards. It pulls rewards
            towards mean zero (https://arxiv.org/abs/2312.09244, eq. 2). None adds no penalty.
        loss_type: "sigmoid" compares two rewards; "plackett_luce" and "regression" read whole rankings.
        ranking_top_k: The `top_k` of `plackett_luce_losses`.
        label_smoothing: Probability that a label is wrong (conservative DPO, see https://arxiv.org/abs/2305.18290).
        ties: "rao_kupper" or "davidson": comparisons with probability 0.5 are ties, see `tie_losses`. With any
            other value, all comparisons have the cross-entropy of their probability.
        tie_threshold: The `threshold` of `tie_losses`.
    """

    center_rewards_coefficient: float | None = None
    loss_type: str = "sigmoid"
    ranking_top_k: int | None = None
    label_smoothing: float = 0.0
    ties: str | None = None
    tie_threshold: float = 1.0

    @classmethod
    def of(cls, settings: Any) -> "Loss":
        """Return the loss that a `RewardConfig` describes."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def per_row(self, rewards_SA: torch.Tensor, table: Comparisons[torch.Tensor]) -> torch.Tensor:
        """Compute the weighted loss of each data row, [P]. Their sum divided by `table.weight_sum_1` is the loss.

        Args:
            rewards_SA: Rewards, float32 or wider; values of padding have no effect.
            table: Comparisons of the rewards, on the same device.
        """
        better_C, worse_C = table.compared(rewards_SA)
        rows = len(rewards_SA) // table.answers
        losses_C: Any = 0.0
        if self.loss_type not in LISTWISE_LOSSES:
            losses_C = self._comparison_losses(better_C - worse_C - table.margin_C, table.probability_C)
        if self.center_rewards_coefficient is not None:
            losses_C = losses_C + self.center_rewards_coefficient * (better_C + worse_C) ** 2
        losses_P = (losses_C * table.weight_C).masked_fill(table.weight_C == 0, 0.0).unflatten(0, (rows, -1)).sum(-1)
        if self.loss_type not in LISTWISE_LOSSES:
            return losses_P
        losses_G = self._ranking_losses(*map(table.by_ranking, (rewards_SA, table.grade_SA)))
        weight_G = table.ranking_weight_G
        return losses_P + (losses_G * weight_G).masked_fill(weight_G == 0, 0.0).unflatten(0, (rows, -1)).sum(-1)

    def _comparison_losses(self, difference_C: torch.Tensor, probability_C: torch.Tensor) -> torch.Tensor:
        """Compute the losses of comparisons, [C].

        With a model of ties, see `tie_losses`. Otherwise it is the cross-entropy between each label's probability and
        ``sigmoid(difference)``. For probability 1 this is the Bradley-Terry loss, ``-logsigmoid(difference)``. With
        label smoothing s, a probability p becomes ``p (1 - s) + (1 - p) s``.

        Args:
            difference_C: Reward of the better answer, minus the reward of the worse answer, minus the target margin
                (Llama 2, https://arxiv.org/abs/2307.09288, eq. 2).
            probability_C: Probability that the answer labeled as better is really better.
        """
        if self.ties in TIE_MODELS:
            won_C, tied_C = tie_losses(difference_C, self.ties, self.tie_threshold)
            return torch.where(probability_C == 0.5, tied_C, won_C)
        wrong_C = (1 - probability_C) * (1 - 2 * self.label_smoothing) + self.label_smoothing
        return wrong_C * difference_C - logsigmoid(difference_C)  # since -logsigmoid(-d) = d - logsigmoid(d)

    def _ranking_losses(self, reward_GK: torch.Tensor, grade_GK: torch.Tensor) -> torch.Tensor:
        graded_GK = ~grade_GK.isnan()
        reward_GK = torch.where(graded_GK, reward_GK, 0.0)  # arbitrary values of padding could make gradients NaN
        if self.loss_type == "plackett_luce":
            return plackett_luce_losses(reward_GK, grade_GK, self.ranking_top_k)
        squares_GK = (reward_GK - torch.where(graded_GK, grade_GK, 0.0)) ** 2
        return squares_GK.sum(-1) / graded_GK.sum(-1).clamp(min=1)


def tie_losses(difference_C: torch.Tensor, ties: str | None, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the negative log-likelihoods of a win of the first answer and of a tie, [C] each.

    Let d be the difference of the rewards and t the threshold. In the model of Rao and Kupper (1967,
    https://doi.org/10.1080/01621459.1967.10482901), the first answer wins with probability ``sigmoid(d - t)``, the
    second with ``sigmoid(-d - t)``, and a tie has the remaining probability. In the model of Davidson (1970,
    https://doi.org/10.1080/01621459.1970.10481082), a win, a loss and a tie have probabilities proportional to
    ``exp(d / 2)``, ``exp(-d / 2)`` and ``t``.

    Args:
        difference_C: d, the reward of the first answer minus the reward of the second.
        ties: "rao_kupper" or "davidson".
        threshold: t > 0. A larger threshold makes ties more probable.
    """
    if ties == "rao_kupper":
        won_C, lost_C = -logsigmoid(difference_C - threshold), -logsigmoid(-difference_C - threshold)
        # equals -log(1 - sigmoid(d - t) - sigmoid(-d - t)), but without cancellation
        return won_C, won_C + lost_C - math.log(math.expm1(2 * threshold))
    tied_C = torch.full_like(difference_C, math.log(threshold))
    total_C = torch.stack([difference_C / 2, -difference_C / 2, tied_C]).logsumexp(0)
    return total_C - difference_C / 2, total_C - tied_C


def plackett_luce_losses(reward_GK: torch.Tensor, grade_GK: torch.Tensor, top_k: int | None = None) -> torch.Tensor:
    """Compute the negative log-likelihood of each ranking under the Plackett-Luce model, [G].

    The best answer is drawn by the softmax of all rewards, the next answer by the softmax of the remaining rewards,
    and so on (Luce 1959; Plackett 1975, https://doi.org/10.2307/2346567; ListMLE,
    https://doi.org/10.1145/1390156.1390306). Answers with equal grades are not compared: the candidates of a
    draw are the drawn answer and all answers with lower grades.

    Args:
        reward_GK: Rewards of the answers.
        grade_GK: Grades of the answers; NaN for missing answers.
        top_k: Count only answers with fewer than k better ones: the first k draws if all grades differ. None counts
            all answers.
    """
    outranks_GKK = grade_GK[:, :, None] > grade_GK[:, None, :]  # false for NaN
    candidate_GKK = outranks_GKK | torch.eye(reward_GK.shape[1], dtype=torch.bool, device=reward_GK.device)
    candidate_reward_GKK = torch.where(candidate_GKK, reward_GK[:, None, :], float("-inf"))
    counted_GK = ~grade_GK.isnan()
    if top_k is not None:
        counted_GK = counted_GK & (outranks_GKK.sum(1) < top_k)
    return torch.where(counted_GK, candidate_reward_GKK.logsumexp(-1) - reward_GK, 0.0).sum(-1)


# ---- losses of batches


@dataclass(frozen=True)
class StepResult:
    """Loss and rewards of a batch, on the device.

    Attributes:
        loss: The loss of the batch, or a micro-batch's share of it. The shares add up to the batch's loss.
        losses_P: The weighted loss of each data row; 0 for padding.
        rewards_SA: Rewards, float32 or wider; arbitrary for padding.
        tokens_S: Tokens that each reward adds: a sequence, or a step. Shared tokens count for every sequence. 0 for
            padding.
        outputs: The model's outputs for padded rows; None for packed rows.
    """

    loss: torch.Tensor
    losses_P: torch.Tensor
    rewards_SA: torch.Tensor
    tokens_S: torch.Tensor
    table: Comparisons[torch.Tensor]
    outputs: Any = None

    @property
    def present_P(self) -> torch.Tensor:
        """Mask of the real (non-padding) data rows, [P]."""
        return self.tokens_S.unflatten(0, (-1, self.table.answers)).sum(-1) > 0

    @property
    def rewards_by_row(self) -> torch.Tensor:
        """The rewards by data row: [P, K], or [P, A, K] for several attributes."""
        return self.rewards_SA.unflatten(0, (-1, self.table.answers)).transpose(1, 2).squeeze(1)

    def detach(self) -> "StepResult":
        """Return a copy without autograd graph and model outputs."""
        detached = {name: getattr(self, name).detach() for name in ("loss", "losses_P", "rewards_SA")}
        return replace(self, **detached, outputs=None)


def batch_loss(model: nn.Module, batches: Sequence[Batch[torch.Tensor]], loss: Loss, **extras: Any) -> StepResult:
    """Compute the loss and the rewards of one or more micro-batches of a batch, merged into one result.

    Without gradients, each micro-batch is executed separately. Micro-batches of the same shape can then run the same
    compiled program, at any position in the batch.

    Args:
        model: The full model, wrappers included.
        batches: The micro-batches, on the model's device.
        loss: The loss, with its settings.
        extras: Further arguments of the model.
    """
    compute, parts = current().compiled(_compute), []
    for batch in batches:
        parts.append(compute(model, batch, loss, extras))
        if len(batches) > 1 and not torch.is_grad_enabled():
            current().step_boundary()
    return parts[0] if len(parts) == 1 else _join(parts)


def _compute(model: nn.Module, batch: Batch[torch.Tensor], loss: Loss, extras: dict[str, Any]) -> StepResult:
    rewards_SA, outputs = rewards_of(model, batch, **extras)
    losses_P = loss.per_row(rewards_SA, batch.table)
    total = losses_P.sum() / batch.table.weight_sum_1.squeeze()
    return StepResult(total, losses_P, rewards_SA, batch.tokens_S, batch.table, outputs)


def _join(parts: Sequence[StepResult]) -> StepResult:
    """Merge the results of micro-batches by summing them.

    Every result covers all data rows of the batch. For rows in other micro-batches, losses, weights and numbers of
    tokens are 0 in it, and rewards are set to 0 here.
    """
    sums: Any = {name: sum(getattr(part, name) for part in parts) for name in ("loss", "losses_P", "tokens_S")}
    rewards_SA: Any = sum(torch.where(part.tokens_S[:, None] > 0, part.rewards_SA, 0.0) for part in parts)
    weights: Any = {name: sum(getattr(part.table, name) for part in parts) for name in WEIGHTS}
    return StepResult(**sums, rewards_SA=rewards_SA, table=replace(parts[0].table, **weights))
