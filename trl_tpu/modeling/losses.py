"""Computes the losses of reward modeling, of pairs, ranked answers and steps, in plain torch.

Letters: P pairs, prompts or solutions, K answers or steps of each; of answers i and j, [P, K, K] has i in the rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from ..data.judgements import is_above, is_equal, weighted


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What the loss depends on beside rewards and labels, as in `RewardConfig`.

    Args:
        center_rewards_coefficient: As in `pairwise_losses`; of ranked answers, over all of which one is better.
        loss_type: Of ranked answers, "sigmoid", "plackett_luce" or "regression".
        ranking_top_k: The `top_k` of `plackett_luce_losses`.
        margin_scale: Makes differences of grades, times this, target margins (Llama 2's of several degrees,
            https://arxiv.org/abs/2307.09288, eq. 2).
        label_smoothing: As in `pairwise_losses`.
        ties: Of ranked answers, "rao_kupper" or "davidson" take equal grades as ties: see `tie_losses`.
        tie_threshold: Of these.
        attribute_loss_weights: Of each attribute's loss in the mean over those that grade a prompt's answers; None
            weighs them alike.
    """

    center_rewards_coefficient: float | None = None
    loss_type: str = "sigmoid"
    ranking_top_k: int | None = None
    margin_scale: float | None = None
    label_smoothing: float = 0.0
    ties: str | None = None
    tie_threshold: float = 1.0
    attribute_loss_weights: Sequence[float] | None = None

    def losses_of(self, rewards_PK: torch.Tensor, labels: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the loss of each pair or prompt, [P], by the labels that `trl_tpu.data.judgements` has made.

        Where the labels have a `weight`, [P], it is how much each counts in the mean, and multiplies its loss.
        """
        if rewards_PK.dim() == 3:
            return self._of_attributes(rewards_PK, labels)
        if "step" in labels:  # rewards are the log-odds that steps are right
            right_PK = torch.where(labels["step"] > 0, rewards_PK, -rewards_PK)
            return _mean(-logsigmoid(right_PK), labels["is_there"]) * labels["weight"]
        if "grade" not in labels:
            return pairwise_losses(
                rewards_PK,
                labels.get("margin"),
                self.center_rewards_coefficient,
                labels.get("chosen_probability"),
                self.label_smoothing,
            )
        grade_PK, is_there_PK = labels["grade"], labels["is_there"]
        if self.loss_type == "regression":
            losses_P = _mean((rewards_PK - grade_PK) ** 2, is_there_PK)
        elif self.loss_type == "plackett_luce":
            losses_P = plackett_luce_losses(rewards_PK, grade_PK, is_there_PK, self.ranking_top_k)
        else:
            losses_P = self._of_comparisons(rewards_PK, grade_PK, is_there_PK)
        if self.center_rewards_coefficient is not None:
            sums_PKK = rewards_PK[:, :, None] + rewards_PK[:, None, :]
            squares_P = _mean(sums_PKK**2, is_above(grade_PK, is_there_PK))
            losses_P = losses_P + self.center_rewards_coefficient * squares_P
        return losses_P * labels["weight"] if "weight" in labels else losses_P

    def _of_comparisons(
        self, rewards_PK: torch.Tensor, grade_PK: torch.Tensor, is_there_PK: torch.Tensor
    ) -> torch.Tensor:
        """Compute the mean over all comparisons of each prompt, [P]: a prompt is one element, however many it has.

        The loss of each is that of a pair (InstructGPT, https://arxiv.org/abs/2203.02155, eq. 1).
        """
        above_PKK = is_above(grade_PK, is_there_PK)
        rewards_PKK2 = torch.stack(torch.broadcast_tensors(rewards_PK[:, :, None], rewards_PK[:, None, :]), dim=-1)
        if self.ties in TIES:
            equal_PKK = is_equal(grade_PK, is_there_PK)
            won_PKK, tied_PKK = tie_losses(rewards_PKK2, self.ties, self.tie_threshold)
            return _mean(torch.where(equal_PKK, tied_PKK, won_PKK), above_PKK | equal_PKK)
        margin_PKK = None
        if self.margin_scale is not None:
            margin_PKK = self.margin_scale * (grade_PK[:, :, None] - grade_PK[:, None, :])
        losses_PKK = pairwise_losses(rewards_PKK2, margin_PKK, label_smoothing=self.label_smoothing)
        return _mean(losses_PKK, above_PKK)

    def _of_attributes(self, rewards_PAK: torch.Tensor, labels: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the weighted mean over the attributes of each prompt, [P]: each that is there is a ranking."""
        rankings = {name: labels[name].flatten(0, 1) for name in ("grade", "is_there")}
        losses_PA = self.losses_of(rewards_PAK.flatten(0, 1), rankings).unflatten(0, rewards_PAK.shape[:2])
        are_there_PA = labels["is_there"].any(-1)
        weights = self.attribute_loss_weights or [1.0] * rewards_PAK.shape[1]
        total_P = weighted(are_there_PA.float(), weights)
        return weighted(torch.where(are_there_PA, losses_PA, 0.0), weights) / torch.where(total_P > 0, total_P, 1.0)


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
        rewards_P2: Rewards of the chosen and the rejected dialogue of each pair; of all comparisons [P, K, K, 2].
        margin_P: The target margin of each pair (Llama 2, https://arxiv.org/abs/2307.09288, eq. 2).
        center_rewards_coefficient: c, which pulls rewards towards mean zero (https://arxiv.org/abs/2312.09244, eq. 2).
        chosen_probability_P: How likely chosen is the better one: then the loss is the cross-entropy with that.
        label_smoothing: How likely a label is to be wrong: the probability that the answer preferred is the better one
            is moved by this towards its opposite (https://arxiv.org/abs/2305.18290 in its later, conservative form).
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


TIES = ("rao_kupper", "davidson")


def tie_losses(rewards_P2: torch.Tensor, ties: str | None, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the negative log-likelihoods that the first of two answers is the better one, and that they tie, [P].

    With d the difference of their rewards and t the threshold, by Rao and Kupper (1967,
    https://doi.org/10.1080/01621459.1967.10482901) the first wins with ``sigmoid(d - t)``, and they tie with what is
    left of both; by Davidson (1970, https://doi.org/10.1080/01621459.1970.10481082) the two wins and the tie are as
    likely as ``exp(d / 2)``, ``exp(-d / 2)`` and ``t`` are large.

    Args:
        rewards_P2: The rewards of the two, of any shape [..., 2].
        ties: "rao_kupper" or "davidson".
        threshold: t, above 0: the larger, the more often answers tie.
    """
    first_P, second_P = rewards_P2.unbind(-1)
    difference_P = first_P - second_P
    if ties == "rao_kupper":
        won_P, lost_P = -logsigmoid(difference_P - threshold), -logsigmoid(-difference_P - threshold)
        return won_P, won_P + lost_P - math.log(math.expm1(2 * threshold))  # 1 - sigmoid - sigmoid, without canceling
    tied_P = torch.full_like(difference_P, math.log(threshold))
    total_P = torch.stack([difference_P / 2, -difference_P / 2, tied_P]).logsumexp(0)
    return total_P - difference_P / 2, total_P - tied_P


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


def _mean(values: torch.Tensor, are_there: torch.Tensor) -> torch.Tensor:
    """Return the mean over those of each prompt that are there, [P], of one dimension more or two."""
    return torch.where(are_there, values, 0.0).flatten(1).sum(1) / are_there.flatten(1).sum(1).clamp(min=1)
