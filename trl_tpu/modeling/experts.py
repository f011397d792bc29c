"""Mixture-of-experts blocks in static shapes: every expert sees every token, and its weight there is often 0.

transformers' own ways sort the tokens by expert, in shapes that depend on the routing, or copy an expert's weights for
every token. XLA compiles fixed shapes; this way costs experts / experts-per-token times the needed multiplications.
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .. import runtime
from ..parallel.mesh import BATCH_AXES

STATIC_EXPERTS = "trl_tpu_static"


def static_experts(
    experts: Any, hidden_TH: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum, [T, H], of the experts that each token is routed to.

    Args:
        experts: transformers' module of E experts' weights.
        hidden_TH: The tokens' hidden states.
        expert_TK: The K experts of each token.
        weight_TK: Their weights.
    """
    inner = "gate_up_proj" if experts.has_gate else "up_proj"
    every_E = torch.arange(len(getattr(experts, inner)), device=hidden_TH.device)
    weight_TE = (weight_TK.unsqueeze(-1) * (expert_TK.unsqueeze(-1) == every_E)).sum(1)
    inner_ETI = _each(experts, hidden_TH.expand(len(every_E), -1, -1), inner)
    inner_ETI = experts._apply_gate(inner_ETI) if experts.has_gate else experts.act_fn(inner_ETI)
    outer_ETH = _each(experts, inner_ETI, "down_proj")
    if experts.has_post_expert_norm:
        outer_ETH = experts.post_expert_norm(outer_ETH)
    return torch.einsum("eth,te->th", outer_ETH, weight_TE.to(outer_ETH.dtype)).to(hidden_TH.dtype)


def _each(experts: Any, input_ETI: torch.Tensor, name: str) -> torch.Tensor:
    weight = getattr(experts, name)
    weight_EIO = weight if experts.is_transposed else weight.transpose(1, 2)
    output_ETO = torch.bmm(input_ETI.to(weight.dtype), weight_EIO)
    # on a mesh: whole experts over `tensor`, tokens where they are
    output_ETO = runtime.current().constrain(output_ETO, ("tensor", BATCH_AXES, None))
    return output_ETO + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else output_ETO


def use_static_experts(model: PreTrainedModel) -> None:
    """Give the mixture-of-experts blocks of ``model`` the implementation above; other models have none."""
    ALL_EXPERTS_FUNCTIONS.register(STATIC_EXPERTS, static_experts)
    model.set_experts_implementation(STATIC_EXPERTS)
