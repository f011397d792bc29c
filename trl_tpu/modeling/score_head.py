"""The score head: the linear layer that turns a hidden state into a reward, `score` in every transformers decoder."""

from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call

from ..errors import UserError


def find_score_head(model: nn.Module) -> nn.Module | None:
    """Return the score head of ``model``; None if it has none."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "score" and hasattr(module, "forward"):
            return module
    return None


def score_head_of(model: nn.Module) -> nn.Module:
    """Return the score head of ``model``.

    Raises:
        UserError: It has none.
    """
    if (head := find_score_head(model)) is None:
        raise UserError(f"{type(model).__name__} has no `score` head whose rewards could be read from packed rows.")
    return head


class _InFloat32:
    """A module's forward outside autocast. A copy of the module has one of its own, with the copy's weights."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        self.__wrapped__ = forward  # bound to the module, and so copied with it

    def __call__(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return self.__wrapped__(hidden.float(), *args, **kwargs)


def keep_score_head_in_float32(model: nn.Module) -> None:
    """Run the score head outside autocast: bfloat16 would round every reward to 8 bits before the loss sees it."""
    head = find_score_head(model)
    if head is None or any(parameter.dtype != torch.float32 for parameter in head.parameters()):
        return
    if not isinstance(head.forward, _InFloat32):
        head.forward = _InFloat32(head.forward)  # type: ignore[method-assign]


def score_wide(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the rewards [...] of hidden states [..., H] in float32 or, where either has it, in float64."""
    parameters = dict(head.named_parameters())
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    for parameter in parameters.values():
        dtype = torch.promote_types(dtype, parameter.dtype)
    wide = {name: parameter.to(dtype) for name, parameter in parameters.items()}
    with torch.autocast(hidden.device.type, enabled=False):
        return functional_call(head, wide, (hidden.to(dtype),)).squeeze(-1)
