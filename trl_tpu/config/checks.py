"""Checks of settings before anything is loaded, mostly by the declarations in `settings`."""

import logging
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Any

from .. import runtime
from ..compat.arguments import TrainingArguments as TrainingArguments  # pickles of earlier versions name this module
from ..errors import UserError
from .settings import CIRCUMSTANCES, SETTINGS

logger = logging.getLogger(__name__)


def holds(args: Any, condition: str) -> bool:
    """Return whether a setting meets a condition.

    Args:
        args: The settings.
        condition: NAME=PATTERN, with a regular expression to search for in the value. NAME alone is met by any value
            that turns the setting on.
    """
    name, _, pattern = condition.partition("=")
    value = _value(args, name)
    return bool(re.search(pattern, str(value)) if pattern else value and value != "no")


def check_limits(args: Any, *circumstances: str) -> None:
    """Reject settings that some circumstances, or other settings, rule out.

    Args:
        args: The settings to check.
        circumstances: Names in `CIRCUMSTANCES` that apply. "always" and conditions on other settings apply anyway.

    Raises:
        UserError: With the setting, its value, the reason and the advice.
    """
    for name, where, advice in _rejected(args, {"always", *circumstances}):
        reason, default = CIRCUMSTANCES.get(where, "").format(runtime=runtime.current().name), "leave it out"
        if not reason:
            other = where.partition("=")[0]
            reason, default = f"impossible with {_shown(args, other)}", f"leave it out, or change {other}"
        raise UserError(f"{_shown(args, name)} is {reason}: {advice or default}.")


def unused_settings(args: Any, kind: str) -> list[str]:
    """Return the given settings that have no meaning for a kind of rows, as "NAME=VALUE".

    Args:
        args: The settings.
        kind: "pairs", "answers" or "solutions". Rankings use all settings of the loss.
    """
    return [_shown(args, name) for name, where, _ in _rejected(args, {kind}) if where == kind]


def _rejected(args: Any, circumstances: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, circumstance or condition, and advice for each rejected setting."""
    for name, setting in SETTINGS.items():
        for where, advice, value in setting.rejected:
            for each in where.split():
                applies = each in circumstances if each in CIRCUMSTANCES else holds(args, each)
                if applies and holds(args, f"{name}={value}"):
                    yield name, each, advice


def _value(args: Any, name: str) -> Any:
    """Return the value of a setting; of an enum's member its text."""
    return getattr(value := getattr(args, name), "value", value)


def _shown(args: Any, name: str) -> str:
    return re.sub(r"\s*\n\s*", " ", f"{name}={_value(args, name)!r}")  # accelerate's objects have several lines


def warn_of_unmet_needs(args: Any) -> None:
    """Warn of each setting in the dataclass ``args`` that has no effect: the condition that it needs is not met."""
    for setting, default in ((item.name, item.default) for item in fields(args) if item.name in SETTINGS):
        need = SETTINGS[setting].needs
        if need and _value(args, setting) != default and not holds(args, need):
            other = need.partition("=")[0]
            # a pattern with ^ is not a value to set
            change = f"change {other}" if "^" in need else f"set {need}"
            logger.warning("%s has no effect with %s: %s.", _shown(args, setting), _shown(args, other), change)


def check_values(args: Any) -> None:
    """Reject invalid values.

    Raises:
        UserError: With the setting, its value and the rule.
    """
    for setting, (_, _, _, valid, _) in SETTINGS.items():
        if valid is not None and hasattr(args, setting) and not valid[1](value := getattr(args, setting)):
            raise UserError(f"{setting} must be {valid[0]}, got {value!r}.")
    names, weights, loss_weights = args.attributes or [], args.attribute_weights, args.attribute_loss_weights
    # one count for names, distinct names and weights: 0 without attributes, otherwise at least 2
    counts = {len(values) for values in (names, set(names), weights, loss_weights) if values is not None}
    is_finite = math.isfinite(sum([*(weights or []), *(loss_weights or [])]))
    if counts not in ({0}, {max(2, len(names))}) or not is_finite or not min(loss_weights or [1.0]) > 0:
        raise UserError(
            f"attributes={names} must be at least two different names, attribute_weights={weights} one finite number "
            f"per attribute, and attribute_loss_weights={loss_weights} one positive finite number per attribute."
        )


def check_one_gpu(count: int) -> None:
    """Raise UserError if a process would use several GPUs by `nn.DataParallel`, as transformers does."""
    if count > 1:
        raise UserError(
            f"One process sees {count} GPUs, and nn.DataParallel is not supported. Launch one process per GPU "
            "(torchrun --nproc_per_node=...), or make one GPU visible (CUDA_VISIBLE_DEVICES=0)."
        )


def warn_of_high_learning_rate(args: Any, model: Any) -> None:
    """Warn if a full model is trained at TRL's default learning rate. That rate is meant for adapters."""
    sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    trained = sum(size for size, trains in sizes if trains)
    if args.learning_rate == 1e-4 and trained > sum(size for size, _ in sizes) / 2:
        logger.warning(
            "learning_rate=1e-4, TRL's default, is for adapters (--use_peft) and much too high for a full model. "
            "Common rates: 1e-5 for 0.5B, 2e-6 for 1B, 2e-6 to 9e-6 for 8B parameters."
        )
