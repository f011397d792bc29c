"""Computes the pairwise loss of reward modeling, in plain torch."""

import torch
from torch.nn.functional import logsigmoid


def pairwise_losses(
    rewards_P2: torch.Tensor, margin_P: torch.Tensor | None = None, center_rewards_coefficient: float | None = None
) -> torch.Tensor:
    """Compute the loss of each pair, [P]: the negative log-likelihood that chosen beats rejected under Bradley-Terry.

    ``-logsigmoid(chosen - rejected - margin) + c * (chosen + rejected)^2``

    Args:
        rewards_P2: Rewards of the chosen and the rejected dialogue of each pair.
        margin_P: The target margin of each pair (Llama 2, https://arxiv.org/abs/2307.09288, eq. 2).
        center_rewards_coefficient: c, which pulls rewards towards mean zero (https://arxiv.org/abs/2312.09244, eq. 2).
    """
    chosen_P, rejected_P = rewards_P2.unbind(-1)
    difference_P = chosen_P - rejected_P
    if margin_P is not None:
        difference_P = difference_P - margin_P
    losses_P = -logsigmoid(difference_P)
    if center_rewards_coefficient is not None:
        losses_P = losses_P + center_rewards_coefficient * (chosen_P + rejected_P) ** 2
    return losses_P
