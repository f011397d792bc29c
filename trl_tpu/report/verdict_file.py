"""``verdict.json``: a verdict beside the model that it is on."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from urllib.parse import quote

from ..errors import UserError
from ..evaluation.best_of_n import BestOfN
from ..evaluation.verdict import Verdict

VERDICT_FILE = "verdict.json"
_KINDS: dict[str, type[Verdict] | type[BestOfN]] = {"pairs": Verdict, "best_of_n": BestOfN}


def verdict_name(dataset: str) -> str:
    """Return the name of the file for a verdict: on one of several datasets, or on the only one, without a name.

    `urllib.parse.unquote` gives the dataset's name back.
    """
    return f"verdict-{quote(dataset, safe='')}.json" if dataset else VERDICT_FILE


def verdict_text(verdict: Verdict | BestOfN) -> str:
    """Return a verdict as JSON, with null for what is not finite."""
    kind = next(name for name, type_ in _KINDS.items() if isinstance(verdict, type_))
    spelled = json.dumps({"kind": kind} | dataclasses.asdict(verdict))
    content = json.loads(spelled, parse_constant=lambda _: None)
    return f"{json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)}\n"


def write_verdict(verdict: Verdict | BestOfN, path: Path) -> None:
    """Write a verdict; the file is whole, or as it was."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(verdict_text(verdict), encoding="utf-8")
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
        raise UserError(f"{path} cannot be read as a verdict ({reason}). Remove it, and evaluate again.") from error
    return made


def _made(kind: Any, value: Any) -> Any:
    """Return a value of JSON as one of a type: null is nan for a number that has to be there."""
    if value is None:
        return math.nan if kind is float else None
    if dataclasses.is_dataclass(kind):
        fields = get_type_hints(kind)
        return kind(**{name: _made(fields[name], each) for name, each in value.items()})  # type: ignore[operator]
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        return tuple(_made(parts[0], each) for each in value)
    if get_origin(kind) is dict:
        return {name: _made(parts[1], each) for name, each in value.items()}
    return _made(parts[0], value) if parts else value  # of `X | None` it is X
