"""``verdict.json``: a verdict beside the model that it is on."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..evaluation.best_of_n import BestOfN
from ..evaluation.calibration import Calibration, ConfidenceBin
from ..evaluation.distribution import Distribution
from ..evaluation.length_bias import LengthBias, LengthBin
from ..evaluation.proportion import Proportion
from ..evaluation.verdict import Verdict

VERDICT_FILE = "verdict.json"
_KINDS: dict[str, type[Verdict] | type[BestOfN]] = {"pairs": Verdict, "best_of_n": BestOfN}


def verdict_name(dataset: str) -> str:
    """Return the name of the file for a verdict: on one of several datasets, or on the only one, without a name."""
    return f"verdict-{re.sub(r'[^A-Za-z0-9.-]', '_', dataset)}.json" if dataset else VERDICT_FILE


def as_json(found: Verdict | BestOfN) -> dict[str, Any]:
    """Return a verdict as JSON has it, with null for what is not finite."""
    kind = next(name for name, type_ in _KINDS.items() if isinstance(found, type_))
    return {"kind": kind} | null_for_nonfinite(dataclasses.asdict(found))


def write_verdict(found: Verdict | BestOfN, path: Path) -> None:
    """Write a verdict; the file is whole, or as it was."""
    partial = path.with_name(f"{path.name}.partial")
    text = json.dumps(as_json(found), indent=2, ensure_ascii=False, allow_nan=False)
    partial.write_text(f"{text}\n", encoding="utf-8")
    partial.replace(path)


def read_verdict(path: Path) -> Verdict | BestOfN:
    """Read a verdict back.

    Raises:
        UserError: The file is of another making.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        made: Verdict | BestOfN = _made(_KINDS[content.pop("kind")], content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is no verdict of ours ({reason}). Remove it, and evaluate again.") from error
    return made


# what is not a number, a text or a tuple of them, by the names of fields
_INSIDE: dict[str, type] = {
    "accuracy": Proportion,
    "chosen_is_longer": Proportion,
    "rejected_is_longer": Proportion,
    "margins": Distribution,
    "rewards": Distribution,
    "calibration": Calibration,
    "length": LengthBias,
}
_BINS: dict[type, type] = {Calibration: ConfidenceBin, LengthBias: LengthBin}


def _made(kind: type, content: dict[str, Any]) -> Any:
    fields: dict[str, Any] = {}
    for name, value in content.items():
        if name in _INSIDE and isinstance(value, dict):
            value = _made(_INSIDE[name], value)
        elif name == "groups":
            value = {group: _made(Proportion, each) for group, each in value.items()}
        elif name == "bins":
            value = tuple(_made(_BINS[kind], each) for each in value)
        elif isinstance(value, list):
            value = tuple(value)
        elif value is None and kind is Proportion:
            value = math.nan
        fields[name] = value
    return kind(**fields)


def null_for_nonfinite(value: Any) -> Any:
    """Return the value with None for numbers that are not finite, at any depth: JSON has none."""
    if isinstance(value, dict):
        return {key: null_for_nonfinite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [null_for_nonfinite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
