"""Read the logs of a training run from the ``trainer_state.json`` of its folder."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..errors import UserError
from ..evaluation.best_of_n import BestOfN
from ..evaluation.verdict import Verdict
from .verdict_file import read_verdict

_STATE = "trainer_state.json"
Series = tuple[list[int], list[float]]


@dataclass(frozen=True)
class RunHistory:
    """A run's logs.

    Attributes:
        name: What the report calls it.
        records: What was logged, in order; each has its `step`.
        step: The last one.
        max_steps: Of the whole run.
        resumed_at: The steps from which it went on.
        verdicts: On its evaluation data, as far as they are beside the model, by the run's name and the dataset's.
    """

    name: str
    records: Sequence[dict[str, Any]]
    step: int
    max_steps: int
    resumed_at: Sequence[int]
    verdicts: dict[str, Verdict | BestOfN]

    def series(self, key: str) -> Series:
        """Return the steps and the values of what was logged under a name."""
        found = [(each["step"], each[key]) for each in self.records if isinstance(each.get(key), int | float)]
        return [step for step, _ in found], [float(value) for _, value in found]

    def evaluated(self, metric: str) -> dict[str, Series]:
        """Return a metric of evaluations, by the name of the dataset, which a single one has not."""
        # every evaluation logs its runtime
        prefixes = [key.removesuffix("_runtime") for key in self._keys if re.fullmatch("eval_(.+_)?runtime", key)]
        named = {each.removeprefix("eval").removeprefix("_"): self.series(f"{each}_{metric}") for each in prefixes}
        return {dataset: series for dataset, series in named.items() if series[0]}

    @property
    def curves(self) -> list[str]:
        """The names under which training has logged numbers again and again."""
        names = (key for key in self._keys if not key.startswith("eval_") and key not in ("step", "epoch"))
        return [name for name in names if len(self.series(name)[0]) > 1]

    @cached_property
    def _keys(self) -> list[str]:
        return list(dict.fromkeys(key for record in self.records for key in record))


def read_run(folder: Path, name: str) -> RunHistory:
    """Read the logs of a run: of its last checkpoint, or of the folder itself where that goes further.

    Raises:
        UserError: There are none, or a file is broken.
    """
    steps = {path: path.parent.name[11:] for path in folder.glob(f"checkpoint-*/{_STATE}")}
    checkpoints = sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path]))
    paths = [path for path in (*checkpoints[-1:], folder / _STATE) if path.is_file()]
    if not paths:
        raise UserError(
            f"{folder} has no {_STATE}, nor has a checkpoint in it. Name the `output_dir` of a run that has saved, or "
            "a file of rows that `trl-tpu score --output` wrote."
        )
    verdicts = {}
    for path in sorted(folder.glob("verdict*.json")):
        dataset = unquote(path.stem.removeprefix("verdict").removeprefix("-"))
        verdicts[f"{name}: {dataset}" if dataset else name] = read_verdict(path)
    try:
        state, *later = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        for other in later:  # of an earlier run in the same folder, unless it goes on where the checkpoint ended
            history = state["log_history"]
            state = other if other["log_history"][: len(history)] == history else state
        run = folder / "_run.json"
        return RunHistory(
            name=name,
            records=[record for record in state["log_history"] if "step" in record],
            step=state["global_step"],
            max_steps=state["max_steps"],
            resumed_at=json.loads(run.read_text(encoding="utf-8")).get("resumed_at", []) if run.is_file() else [],
            verdicts=verdicts,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"The logs of {folder} cannot be read: {type(error).__name__}: {error}.") from error
