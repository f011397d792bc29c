"""Parameters that stay as they are."""

import re

from torch import nn

from ..errors import UserError
from ..parallel.shard_report import kind_of


def freeze(model: nn.Module, pattern: str | None) -> None:
    """Let parameters in whose names ``pattern`` is found take no gradient; None lets all train that would.

    Raises:
        UserError: It is found in none that would train, or in all of them.
    """
    if pattern is None:
        return
    names: dict[nn.Parameter, list[str]] = {}  # a tied one has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    frozen = [parameter for parameter, own in names.items() if any(re.search(pattern, name) for name in own)]
    if len(frozen) in (0, len(names)):
        kinds = dict.fromkeys(kind_of(name) for own in names.values() for name in own)
        raise UserError(
            f"frozen_parameters={pattern!r} is found in the names of {'all' if frozen else 'no'} parameters that "
            f"would train: {', '.join(kinds)}. Give a regular expression that is found in some of them."
        )
    for parameter in frozen:
        parameter.requires_grad_(False)
