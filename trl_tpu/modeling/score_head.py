"""The score head: the linear layer that turns a hidden state into a reward, `score` in every transformers decoder."""

import functools

import torch
from torch import nn
from torch.func import functional_call


def find_score_head(model: nn.Module) -> nn.Module | None:
    """Return the score head of ``model``; None if it has none."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "score" and hasattr(module, "forward"):
            return module
    return None


def keep_score_head_in_float32(model: nn.Module) -> None:
    """Run the score head outside autocast: bfloat16 would round every reward to 8 bits before the loss sees it."""
    head = find_score_head(model)
    if head is None or any(parameter.dtype != torch.float32 for parameter in head.parameters()):
        return
    forward = head.forward

    @functools.wraps(forward)
    def forward_float32(hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return forward(hidden.float(), *args, **kwargs)

    head.forward = forward_float32  # type: ignore[method-assign]


def score_wide(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the rewards [...] of hidden states [..., H] in float32 or, where either has it, in float64."""
    parameters = dict(head.named_parameters())
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    for parameter in parameters.values():
        dtype = torch.promote_types(dtype, parameter.dtype)
    wide = {name: parameter.to(dtype) for name, parameter in parameters.items()}
    with torch.autocast(hidden.device.type, enabled=False):
        return functional_call(head, wide, (hidden.to(dtype),)).squeeze(-1)
