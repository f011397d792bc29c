"""Computes the losses of reward modeling, of pairs and of ranked answers, in plain torch.

Letters: P pairs or prompts, K answers of each; of answers i and j, [P, K, K] has i in the rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from ..data.judgements import is_above


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What the loss depends on beside rewards and labels, as in `RewardConfig`.

    Args:
        center_rewards_coefficient: As in `pairwise_losses`.
        loss_type: Of ranked answers, "sigmoid" or "plackett_luce".
        ranking_top_k: The `top_k` of `plackett_luce_losses`.
        margin_scale: As in `comparison_losses`.
        label_smoothing: How likely a label is to be wrong: the probability that the answer preferred is the better one
            is moved by this towards its opposite (https://arxiv.org/abs/2305.18290 in its later, conservative form).
    """

    center_rewards_coefficient: float | None = None
    loss_type: str = "sigmoid"
    ranking_top_k: int | None = None
    margin_scale: float | None = None
    label_smoothing: float = 0.0

    def losses_of(self, rewards_PK: torch.Tensor, labels: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the loss of each pair or prompt, [P], by the labels that `trl_tpu.data.judgements` has made."""
        if "grade" not in labels:
            return pairwise_losses(
                rewards_PK,
                labels.get("margin"),
                self.center_rewards_coefficient,
                labels.get("chosen_probability"),
                self.label_smoothing,
            )
        grade_PK, is_there_PK = labels["grade"], labels["is_there"]
        if self.loss_type == "plackett_luce":
            losses_P = plackett_luce_losses(rewards_PK, grade_PK, is_there_PK, self.ranking_top_k)
        else:
            losses_P = comparison_losses(rewards_PK, grade_PK, is_there_PK, self.margin_scale, self.label_smoothing)
        if self.center_rewards_coefficient is not None:
            sums_PKK = rewards_PK[:, :, None] + rewards_PK[:, None, :]
            squares_P = _mean(sums_PKK**2, is_above(grade_PK, is_there_PK))
            losses_P = losses_P + self.center_rewards_coefficient * squares_P
        return losses_P


def pairwise_losses(
    rewards_P2: torch.Tensor,
    margin_P: torch.Tensor | None = None,
    center_rewards_coefficient: float | None = None,
    chosen_probability_P: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute the loss of each pair, [P]: the negative log-likelihood that chosen beats rejected under Bradley-Terry.

    ``-logsigmoid(chosen - rejected - margin) + c * (chosen + rejected)^2``

    Args:
        rewards_P2: Rewards of the chosen and the rejected dialogue of each pair.
        margin_P: The target margin of each pair (Llama 2, https://arxiv.org/abs/2307.09288, eq. 2).
        center_rewards_coefficient: c, which pulls rewards towards mean zero (https://arxiv.org/abs/2312.09244, eq. 2).
        chosen_probability_P: How likely chosen is the better one: then the loss is the cross-entropy with that.
        label_smoothing: As in `Loss`.
    """
    chosen_P, rejected_P = rewards_P2.unbind(-1)
    difference_P = chosen_P - rejected_P
    if margin_P is not None:
        difference_P = difference_P - margin_P
    losses_P = -logsigmoid(difference_P)
    if chosen_probability_P is not None or label_smoothing:
        target_P = torch.ones_like(losses_P) if chosen_probability_P is None else chosen_probability_P
        target_P = target_P + label_smoothing * (1 - 2 * target_P)
        losses_P = losses_P + (1 - target_P) * difference_P  # -logsigmoid(-d) is -logsigmoid(d) + d
    if center_rewards_coefficient is not None:
        losses_P = losses_P + center_rewards_coefficient * (chosen_P + rejected_P) ** 2
    return losses_P


def comparison_losses(
    rewards_PK: torch.Tensor,
    grade_PK: torch.Tensor,
    is_there_PK: torch.Tensor,
    margin_scale: float | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute the mean over all comparisons of each prompt, [P]: a prompt is one element, however many it has.

    ``-logsigmoid(reward_i - reward_j - margin)`` where i has a higher grade than j (InstructGPT,
    https://arxiv.org/abs/2203.02155, eq. 1).

    Args:
        rewards_PK, grade_PK: Of each answer.
        is_there_PK: Which answers a prompt has.
        margin_scale: Makes grades margins: ``margin_scale * (grade_i - grade_j)``.
        label_smoothing: As in `Loss`.
    """
    above_PKK = is_above(grade_PK, is_there_PK)
    difference_PKK = rewards_PK[:, :, None] - rewards_PK[:, None, :]
    if margin_scale is not None:
        difference_PKK = difference_PKK - margin_scale * (grade_PK[:, :, None] - grade_PK[:, None, :])
    difference_PKK = torch.where(above_PKK, difference_PKK, 0.0)
    losses_PKK = -logsigmoid(difference_PKK) + label_smoothing * difference_PKK
    return _mean(losses_PKK, above_PKK)


def plackett_luce_losses(
    rewards_PK: torch.Tensor, grade_PK: torch.Tensor, is_there_PK: torch.Tensor, top_k: int | None = None
) -> torch.Tensor:
    """Compute the negative log-likelihood of each prompt's order, [P], by Plackett and Luce.

    The best answer is drawn by the softmax of all rewards, the next by that of the others, and so on (Luce 1959;
    Plackett 1975, https://doi.org/10.2307/2346567; ListMLE, https://doi.org/10.1145/1390156.1390306). Answers of one
    grade are not compared: each is drawn from itself and those below.

    Args:
        rewards_PK, grade_PK: Of each answer.
        is_there_PK: Which answers a prompt has.
        top_k: Only the first k draws count; by default all.
    """
    above_PKK = is_above(grade_PK, is_there_PK)
    left_PKK = above_PKK | torch.eye(rewards_PK.shape[1], dtype=torch.bool, device=rewards_PK.device)
    scores_PKK = torch.where(left_PKK, rewards_PK[:, None, :], float("-inf"))
    drawn_PK = is_there_PK if top_k is None else is_there_PK & (above_PKK.sum(1) < top_k)
    return torch.where(drawn_PK, scores_PKK.logsumexp(-1) - rewards_PK, 0.0).sum(-1)


def _mean(values_PKK: torch.Tensor, are_there_PKK: torch.Tensor) -> torch.Tensor:
    """Return the mean over those of each prompt that are there, [P]."""
    return torch.where(are_there_PKK, values_PKK, 0.0).sum((1, 2)) / are_there_PKK.sum((1, 2)).clamp(min=1)
