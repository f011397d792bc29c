"""The batch that stopped a run: kept while it may be needed, written to a folder, and run again from there.

The folder has `batch.safetensors` with the tensors of each pass that the step took, and `replay.json`, which says
where they come from and how to run them. It holds token ids, as the device got them, and no text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..checkpoint.storage import to_host
from ..runtime import Runtime

BATCH_FILE = "batch.safetensors"
REPLAY_FILE = "replay.json"

_HELD_BYTES = 2**26
"""Some hundred batches of token ids, beside which a model's weights are gigabytes."""

_NAMED = 16  # numbers in an error

_HOW = (
    "from trl_tpu.training.replay import replay",
    "trainer = ...  # a RewardTrainer made as in the run; its model: the weights named above",
    "losses, gradient_norm = replay(trainer, FOLDER)  # FOLDER: where this file is",
)


@dataclass
class Replay:
    """What `replay.json` says."""

    step: int
    steps_in_a_row: int
    rows: list[int] | None  # of the trainer's `train_dataset`, whose pairs are in the batch; None if unknown
    batch: str  # where it is from
    weights: str
    values: list[dict[str, Any]] = field(default_factory=list)  # what the passes have besides tensors

    def pairs(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """A sentence that names the pairs in the batch: by their rows or else by the first tokens of ``tensors``."""
        if self.rows is not None:
            named = f"the rows {_some(self.rows)} of the trainer's train_dataset"
        else:
            ids = next((tensor for name, tensor in tensors.items() if "input_ids" in name), torch.empty(0))
            named = f"not known by their rows; their tokens begin {_some(ids.flatten().tolist())}"
        return f"The pairs of step {self.step} are {named}."


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_NAMED])) + (", ..." if len(numbers) > _NAMED else "")


class HeldBatches:
    """The passes of steps that may yet be found not finite, as they are on the device: of the last, up to 64 MiB."""

    def __init__(self) -> None:
        self._steps: dict[int, list[dict[str, Any]]] = {}
        self._bytes = 0

    def add(self, step: int, rows: Mapping[str, Any]) -> None:
        """Hold a pass of ``step``; of the oldest steps all or nothing is held."""
        self._steps.setdefault(step, []).append(dict(rows))  # a copy: a loss may take its own keys out
        self._bytes += _bytes_of(rows)
        while self._bytes > _HELD_BYTES and len(self._steps) > 1:
            self._drop(next(iter(self._steps)))

    def drop_before(self, step: int) -> None:
        """Hold no more of the steps before ``step``."""
        for old in [each for each in self._steps if each < step]:
            self._drop(old)

    def _drop(self, step: int) -> None:
        self._bytes -= sum(map(_bytes_of, self._steps.pop(step)))

    def get(self, step: int) -> list[dict[str, Any]] | None:
        return self._steps.get(step)

    def clear(self) -> None:
        self._steps.clear()
        self._bytes = 0


def _bytes_of(rows: Mapping[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors_of([rows]).values())


def tensors_of(passes: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors of passes as ``{pass}.{key}``."""
    return {
        f"{index}.{key}": value
        for index, rows in enumerate(passes)
        for key, value in rows.items()
        if isinstance(value, torch.Tensor)
    }


def same_tensors(passes: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], runtime: Runtime) -> bool:
    """Whether all tensors are equal; reads those on the device. All processes of a mesh take part."""
    these, those = (to_host(tensors_of(each), runtime) for each in (passes, others))
    return these.keys() == those.keys() and all(
        these[name].shape == those[name].shape and bool((these[name] == those[name]).all()) for name in these
    )


def write_replay(
    folder: Path, passes: Sequence[Mapping[str, Any]], what: Replay, runtime: Runtime, writes: bool
) -> str:
    """Write ``passes`` and what is known of them; returns the sentence that names the pairs.

    All processes of a mesh take part, and those that have ``writes`` write.
    """
    tensors = to_host(tensors_of(passes), runtime)
    pairs = what.pairs(tensors)
    if not writes:
        return pairs
    what.values = [
        {key: value for key, value in rows.items() if isinstance(value, bool | int | float)} for rows in passes
    ]
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / BATCH_FILE)
    (folder / REPLAY_FILE).write_text(json.dumps(asdict(what) | {"how": _HOW}, indent=2), encoding="utf-8")
    return pairs


def load_batch(folder: str | Path) -> list[dict[str, Any]]:
    """The passes of a saved step, in order, on the host.

    Raises:
        OSError: A file is missing.
    """
    values = json.loads(Path(folder, REPLAY_FILE).read_text(encoding="utf-8"))["values"]
    tensors = load_file(Path(folder, BATCH_FILE))
    return [
        {key.partition(".")[2]: tensor for key, tensor in tensors.items() if key.startswith(f"{index}.")} | own
        for index, own in enumerate(values)
    ]


def replay(trainer: Any, folder: str | Path) -> tuple[list[float], float]:
    """Run a saved step again, without an update.

    Args:
        trainer: A `RewardTrainer` whose model has the weights of the run.

    Returns:
        The loss of each pass, and the norm of their added gradients.
    """
    trainer.model.train()
    trainer.model.zero_grad()
    losses = []
    for rows in load_batch(folder):
        inputs = {
            key: value.to(trainer.args.device) if isinstance(value, torch.Tensor) else value
            for key, value in rows.items()
        }
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    *losses, norm = trainer.runtime.fetch([*losses, norm])
    trainer.model.zero_grad()
    return [loss.item() for loss in losses], norm.item()
