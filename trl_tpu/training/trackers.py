"""What trackers get of an evaluation beyond its numbers: how margins are spread, and the pairs it gets most wrong.

The trackers are those of `report_to`: transformers has a callback for each, whose open run is used. Nothing is
imported for a tracker that is off.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.integrations.integration_utils import rewrite_logs

from ..data.measure import id_columns

if TYPE_CHECKING:
    from .device_trainer import DeviceTrainer

_ROWS = 16  # of a table
_CHARACTERS = 500  # of a dialogue, at its end, where its answer is
COLUMNS = ("margin", "reward of chosen", "reward of rejected", "chosen", "rejected")


@dataclass(frozen=True)
class Seen:
    """What is shown of an evaluation.

    Args:
        prefix: Of its metrics' names, such as "eval".
        step: Steps of training before it.
        margins_N: Chosen reward less rejected, of all pairs with finite ones.
        rows: By `COLUMNS`, of the pairs with the least margins; none where it is not known which pairs they are.
    """

    prefix: str
    step: int
    margins_N: np.ndarray
    rows: list[tuple[float, float, float, str, str]]

    def named(self, histogram: Any, table: Any) -> dict[str, Any]:
        """Name both as transformers names metrics for trackers."""
        media = {f"{self.prefix}_margins": histogram}
        return rewrite_logs(media | ({f"{self.prefix}_pairs": table} if self.rows else {}))


class EvaluationTables(TrainerCallback):
    """Gives each tracker that is on the pictures of an evaluation, after its numbers."""

    def __init__(self, trainer: "DeviceTrainer") -> None:
        self._trainer = trainer

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        callbacks = self._trainer.callback_handler.callbacks
        sends = [(send, each) for each in callbacks for kind, send in SENDERS.items() if isinstance(each, kind)]
        if not sends or self._trainer.evaluated_rewards is None or not state.is_world_process_zero:
            return
        prefix, rewards = self._trainer.evaluated_rewards
        rewards_N2 = rewards.double().numpy()
        margins_N = rewards_N2[:, 0] - rewards_N2[:, 1]
        finite_N = np.isfinite(margins_N)
        if not finite_N.any():
            return
        pairs = self._trainer.evaluated_pairs(len(rewards_N2))
        rows = _most_wrong(rewards_N2, margins_N, pairs, self._trainer.processing_class)
        seen = Seen(prefix, state.global_step, margins_N[finite_N], rows)
        for send, each in sends:
            send(each, seen)


def _most_wrong(
    rewards_N2: np.ndarray, margins_N: np.ndarray, dataset: Any, tokenizer: Any
) -> list[tuple[float, float, float, str, str]]:
    """Return the pairs with the least margins, by `COLUMNS`; none where ``dataset`` has no token ids of them."""
    names = id_columns(dataset) if isinstance(dataset, Dataset) else None
    if names is None:
        return []
    rows = []
    for index in np.argsort(margins_N, kind="stable")[:_ROWS].tolist():
        texts = [tokenizer.decode(dataset[index][name], skip_special_tokens=True) for name in names]
        chosen, rejected = (text if len(text) <= _CHARACTERS else f"... {text[-_CHARACTERS:]}" for text in texts)
        rewards = rewards_N2[index].tolist()
        rows.append((float(margins_N[index]), rewards[0], rewards[1], chosen, rejected))
    return rows


# ---- one for each tracker


def _to_tensorboard(callback: TensorBoardCallback, seen: Seen) -> None:
    writer = callback.tb_writer
    if writer is None:
        return
    for name, value in seen.named(seen.margins_N, _markdown(seen)).items():
        (writer.add_text if isinstance(value, str) else writer.add_histogram)(name, value, seen.step)
    writer.flush()


def _to_wandb(callback: WandbCallback, seen: Seen) -> None:
    wandb = callback._wandb
    if wandb.run is not None:
        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in seen.rows])
        wandb.log(seen.named(wandb.Histogram(seen.margins_N), table) | {"train/global_step": seen.step})


def _to_trackio(callback: TrackioCallback, seen: Seen) -> None:
    trackio = callback._trackio
    if callback._initialized:
        table = trackio.Table(columns=list(COLUMNS), data=[list(row) for row in seen.rows])
        trackio.log(seen.named(trackio.Histogram(seen.margins_N), table) | {"train/global_step": seen.step})


SENDERS: dict[type[TrainerCallback], Callable[[Any, Seen], None]] = {
    TensorBoardCallback: _to_tensorboard,
    WandbCallback: _to_wandb,
    TrackioCallback: _to_trackio,
}


def _markdown(seen: Seen) -> str:
    """Write the rows as a table."""

    def line(cells: Any) -> str:
        texts = (f"{cell:.3f}" if isinstance(cell, float) else cell.replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(' '.join(text.split()) for text in texts)} |"

    return "\n".join([line(COLUMNS), line(["---"] * len(COLUMNS)), *map(line, seen.rows)])
