"""What trackers get of an evaluation beyond its numbers: how margins are spread, and the pairs it gets most wrong.

The trackers are those of `report_to`: transformers has a callback for each, whose open run is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.integrations.integration_utils import rewrite_logs
from transformers.trainer_callback import CallbackHandler

from ..data.measure import id_columns

_ROWS = 16  # of a table
_CHARACTERS = 500  # of a dialogue, at its end, where its answer is
_COLUMNS = ["margin", "reward of chosen", "reward of rejected", "chosen", "rejected"]


@dataclass(frozen=True)
class Evaluated:
    """The pairs of an evaluation.

    Args:
        prefix: Of its metrics' names, such as "eval".
        rewards_N2: Chosen first.
        pairs: The dataset that they are of, in order; None where that is not known.
        tokenizer: Reads its token ids.
    """

    prefix: str
    rewards_N2: np.ndarray
    pairs: Any
    tokenizer: Any

    @property
    def margins_N(self) -> np.ndarray:
        return self.rewards_N2[:, 0] - self.rewards_N2[:, 1]

    def most_wrong(self) -> list[list[Any]]:
        """Return the pairs with the least margins, by `_COLUMNS`; none where their token ids are not known."""
        names = id_columns(self.pairs) if isinstance(self.pairs, Dataset) else None
        if names is None:
            return []
        rows = []
        for index in np.argsort(self.margins_N, kind="stable")[:_ROWS].tolist():
            texts = [self.tokenizer.decode(self.pairs[index][name], skip_special_tokens=True) for name in names]
            shown = [text if len(text) <= _CHARACTERS else f"... {text[-_CHARACTERS:]}" for text in texts]
            rows.append([float(self.margins_N[index]), *self.rewards_N2[index].tolist(), *shown])
        return rows


class EvaluationTables(TrainerCallback):
    """Gives each tracker that is on the margins of an evaluation and its worst pairs, after its numbers.

    Args:
        handler: Has the trackers' callbacks.
        last: Returns the last evaluation; None where it has no rewards.
    """

    def __init__(self, handler: CallbackHandler, last: Callable[[], Evaluated | None]) -> None:
        self._handler, self._last = handler, last

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        kinds = TensorBoardCallback, WandbCallback, TrackioCallback
        trackers: list[Any] = [each for each in self._handler.callbacks if isinstance(each, kinds)]
        evaluated = self._last() if trackers and state.is_world_process_zero else None
        if evaluated is None or not np.isfinite(evaluated.margins_N).any():
            return
        margins_N = evaluated.margins_N[np.isfinite(evaluated.margins_N)]
        names = list(rewrite_logs({f"{evaluated.prefix}_margins": None, f"{evaluated.prefix}_pairs": None}))
        rows = evaluated.most_wrong()
        for tracker in trackers:
            if isinstance(tracker, TensorBoardCallback):
                if tracker.tb_writer is not None:
                    tracker.tb_writer.add_histogram(names[0], margins_N, state.global_step)
                    if rows:
                        tracker.tb_writer.add_text(names[1], _markdown(rows), state.global_step)
                    tracker.tb_writer.flush()
                continue
            library = tracker._wandb if isinstance(tracker, WandbCallback) else tracker._trackio
            if tracker._initialized:
                media = {names[0]: library.Histogram(margins_N)}
                media |= {names[1]: library.Table(columns=_COLUMNS, data=rows)} if rows else {}
                library.log(media | {"train/global_step": state.global_step})


def _markdown(rows: list[list[Any]]) -> str:
    def line(cells: list[Any]) -> str:
        texts = (f"{cell:.3f}" if isinstance(cell, float) else " ".join(cell.split()) for cell in cells)
        return " | ".join(text.replace("|", r"\|") for text in texts)

    return "\n".join(f"| {line(cells)} |" for cells in [_COLUMNS, ["---"] * len(_COLUMNS), *rows])
