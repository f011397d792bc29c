"""What a training run has logged, read back from the ``trainer_state.json`` of its folder."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..evaluation.best_of_n import BestOfN
from ..evaluation.verdict import Verdict
from .verdict_file import read_verdict

_STATE = "trainer_state.json"
_RUN = "_run.json"
#: What evaluation logs beside the metrics of its datasets, whose names these are not.
_OF_A_VERDICT = ("length_only", "length_controlled")

Series = tuple[list[int], list[float]]


@dataclass(frozen=True)
class RunHistory:
    """A run's logs.

    Attributes:
        name: Of its folder.
        records: What was logged, in order; each has its `step`.
        step: The last one.
        max_steps: Of the whole run.
        resumed_at: The steps from which it went on.
        verdicts: On its evaluation data, by name where there are several, as far as they are beside the model.
    """

    name: str
    records: Sequence[dict[str, Any]]
    step: int
    max_steps: int
    resumed_at: tuple[int, ...]
    verdicts: dict[str, Verdict | BestOfN]

    def series(self, key: str) -> Series:
        """Return the steps and the values of what was logged under a name."""
        found = [(record["step"], record[key]) for record in self.records if is_number(record.get(key))]
        return [step for step, _ in found], [float(value) for _, value in found]

    def evaluated(self, metric: str) -> dict[str, Series]:
        """Return a metric of evaluations, by the name of the dataset, which a single one has not."""
        wanted = re.compile(rf"eval_(?:(.+)_)?{re.escape(metric)}")
        keys = dict.fromkeys(key for record in self.records for key in record)
        matches = [match for key in keys if (match := wanted.fullmatch(key))]
        return {
            match[1] or "": self.series(match[0])
            for match in matches
            if not (match[1] or "").endswith(_OF_A_VERDICT) and self.series(match[0])[0]
        }

    def last(self, key: str) -> float | None:
        """Return the last value that was logged under a name."""
        _, values = self.series(key)
        return values[-1] if values else None

    def names(self, pattern: str) -> list[str]:
        """Return the names under which numbers were logged that a regular expression finds something in."""
        found = re.compile(pattern)
        keys = dict.fromkeys(key for record in self.records for key in record)
        return [key for key in keys if found.search(key) and self.series(key)[0]]


def is_number(value: Any) -> bool:
    """Tell whether a logged value is a number to draw."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isinf(value)


def read_run(folder: Path) -> RunHistory:
    """Read the logs of a run: of its last checkpoint, or of the folder itself where that goes further.

    Raises:
        UserError: There are none, or a file is broken.
    """
    found = [state for path in [*_checkpoints(folder)[-1:], folder] if (state := _state_of(path)) is not None]
    if not found:
        raise UserError(
            f"{folder} has no {_STATE}, nor has a checkpoint in it. Name the `output_dir` of a run that has saved, or "
            "a file of rows that `trl-tpu score --output` wrote."
        )
    state = found[0]
    for other in found[1:]:  # of an earlier run in the same folder, unless it goes on where the checkpoint ended
        history = state["log_history"]
        state = other if other["log_history"][: len(history)] == history else state
    run = _read(folder / _RUN) if (folder / _RUN).is_file() else {}
    resumed_at = run.get("resumed_at")
    return RunHistory(
        name=folder.resolve().name,
        records=[record for record in state["log_history"] if isinstance(record.get("step"), int)],
        step=state.get("global_step", 0),
        max_steps=state.get("max_steps", 0),
        resumed_at=tuple(filter(is_number, resumed_at)) if isinstance(resumed_at, list) else (),
        verdicts={
            path.stem.removeprefix("verdict").removeprefix("-"): read_verdict(path)
            for path in sorted(folder.glob("verdict*.json"))
        },
    )


def _checkpoints(folder: Path) -> list[Path]:
    """Return the folders of checkpoints that have a state, the last one last."""
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((path for path in found if (path / _STATE).is_file()), key=lambda path: int(path.name[11:]))


def _state_of(folder: Path) -> dict[str, Any] | None:
    if not (folder / _STATE).is_file():
        return None
    state = _read(folder / _STATE)
    history = state.get("log_history")
    if not isinstance(history, list) or not all(isinstance(record, dict) for record in history):
        raise UserError(f"{folder / _STATE} has no list of logs (`log_history`). Name another run.")
    return state


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object.")
    return content
