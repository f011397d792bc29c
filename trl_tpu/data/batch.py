"""One batch: rows of tokens, the positions where rewards are read, and a table of comparisons.

A collator makes all micro-batches of a batch at once. Code of users that reads batches is given TRL's dict instead:
`input_ids` and `attention_mask` [K P, L], all first answers before all second ones, and `margin` [P].
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad as pad_tensor

from ..errors import UserError
from ..packing.rows import TokenRows
from .comparisons import ComparisonRule, Comparisons, Labels, compare

OLD_KEYS = ("input_ids_chosen", "attention_mask_chosen", "input_ids_rejected", "attention_mask_rejected")
"""Keys of a batch in TRL up to 0.23."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: P rows of the data, or the part of a batch's rows that these rows of tokens hold."""

    rows: TokenRows[Any]
    table: Comparisons[Any]
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of a batch that a user's collator made; the model is given them."""
    is_old: bool = False
    """Whether it came as a batch of TRL up to 0.23."""

    def map_tensors(self, function: Callable[[Any], Any]) -> "Batch":
        """Return the same batch with ``function`` of each of its own tensors."""
        return replace(self, rows=self.rows.map_tensors(function), table=self.table.map_tensors(function))

    def tensors(self) -> dict[str, Any]:
        """Return all of its own tensors by name."""
        return self.rows.tensors() | self.table.arrays()

    def is_there_P(self) -> Any:
        """Return which rows of the data are in this micro-batch, [P]."""
        return self.rows.tokens_S.reshape(-1, self.table.answers).any(-1)


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one batch, in order. The sum of their losses is the batch's, and so are their gradients.

    It moves to a device as a tensor does: accelerate calls `to`, and a DataLoader that pins memory `pin_memory`.
    """

    parts: tuple[Batch, ...]
    """All but the last only accumulate gradients."""
    pad_token_id: int = 0
    """Fills rows that are padded on request."""

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatches":
        """Return the same batch with ``function`` of each tensor."""
        return replace(self, parts=tuple(part.map_tensors(function) for part in self.parts))

    def to(self, device: Any, non_blocking: bool = False) -> "MicroBatches":
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "MicroBatches":
        return self.map_tensors(torch.Tensor.pin_memory)


_KEY = "micro_batches"


class CollatedBatch(dict[str, Any]):
    """What our collators return: a dict, since loaders and transformers handle dicts.

    `input_ids` and `attention_mask` are made on request, padded and in TRL's order, for scripts that look at a batch.
    """

    @classmethod
    def of(cls, *parts: Batch, pad_token_id: int) -> "CollatedBatch":
        return cls({_KEY: MicroBatches(parts, pad_token_id)})

    @property
    def parts(self) -> tuple[Batch, ...]:
        return self[_KEY].parts

    def __missing__(self, key: str) -> torch.Tensor:
        if key not in ("input_ids", "attention_mask"):
            raise KeyError(f"{key!r} is not in this batch, which has input_ids and attention_mask.")
        sequences, device = _sequences(self.parts), self.parts[0].rows.input_ids_RL.device
        fill = self[_KEY].pad_token_id if key == "input_ids" else 0
        padded_RL = torch.full((len(sequences), max(map(len, sequences))), fill)
        for row_L, ids in zip(padded_RL, sequences, strict=True):
            row_L[: len(ids)] = torch.from_numpy(ids) if key == "input_ids" else 1
        return padded_RL.to(device)


def _sequences(parts: tuple[Batch, ...]) -> list[np.ndarray]:
    """Return the token ids of sequences up to their last scored token, all first answers before all second ones."""
    found: dict[tuple[int, int], np.ndarray] = {}
    for part in parts:
        rows: TokenRows[Any] = part.rows.map_tensors(lambda tensor: tensor.cpu().numpy())
        answers = part.table.answers
        for place in np.flatnonzero(rows.tokens_S).tolist():
            row, column = rows.score_row_S[place], rows.score_column_S[place]
            ids_L = rows.input_ids_RL[row, : column + 1]
            if rows.subtree_end_RL is not None:
                ids_L = ids_L[rows.subtree_end_RL[row, : column + 1] > column]
            found[0 if part.table.has_baseline else place % answers, place // answers] = ids_L
    return [found[key] for key in sorted(found)]


def batches_in(inputs: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Batch]) -> list[Batch]:
    """Return the micro-batches of what a loader gave.

    Args:
        inputs: A `CollatedBatch`, whatever became of its class, or a dict of the user's making.
        read: Reads a dict of the user's making.
    """
    ours = _ours(inputs)
    return [read(inputs)] if ours is None else list(ours.parts)


def apart(inputs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what a step computes at a time: each micro-batch as a batch of its own; a user's batch as it is."""
    if (ours := _ours(inputs)) is None:
        yield inputs
    else:
        yield from (CollatedBatch.of(part, pad_token_id=ours.pad_token_id) for part in ours.parts)


def tensors_in(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tensors of what `apart` gave by name."""
    ours = _ours(inputs)
    return inputs if ours is None else ours.parts[0].tensors()


def _ours(inputs: Any) -> MicroBatches | None:
    """Return the micro-batches of our collators, if a batch, which need be no dict, is theirs."""
    ours = inputs.get(_KEY) if isinstance(inputs, Mapping) else None
    return ours if isinstance(ours, MicroBatches) else None


# ---- TRL's dict

TABLE = "trl_tpu_comparisons"
"""Key of a `Batch` without tokens in a padded batch whose comparisons TRL's keys do not tell; at first of None."""


@dataclass(frozen=True)
class DictReader:
    """Reads padded batches in TRL's form, of today and up to 0.23: made by a user's collator, or for a user's code.

    Args:
        pad_token_id: Fills rows of the old form up to a common length.
        padding_side: Where its halves are padded.
    """

    pad_token_id: int
    padding_side: str = "right"

    def __call__(self, inputs: Mapping[str, Any]) -> Batch:
        """Return the batch. Every key but TRL's own belongs to the user or the model."""
        is_old = "input_ids" not in inputs
        tokens = self._joined(inputs) if is_old else {name: inputs[name] for name in ("input_ids", "attention_mask")}
        input_ids_RL, mask_RL = tokens["input_ids"], tokens["attention_mask"]
        table, own = inputs.get(TABLE), {*tokens, TABLE, "margin", "return_loss"}
        if TABLE in inputs and table is None:
            raise UserError(
                "The data has grades or `chosen_probability`, which a batch of `trainer.data_collator` does not hold. "
                "Take batches from `trainer.get_train_dataloader()` or `get_eval_dataloader()`."
            )
        if not isinstance(table, Batch):
            table = _pairs(len(input_ids_RL) // 2, input_ids_RL.device, mask_RL, inputs.get("margin"))
        elif table.table.has_baseline:
            own |= {"labels"}  # by which the model would compute a loss of its own
        extras = {key: value for key, value in inputs.items() if key not in own and not isinstance(value, Batch)}
        extras = {} if is_old else extras  # which went nowhere in TRL up to 0.23
        rows = replace(table.rows, input_ids_RL=input_ids_RL, attention_mask_RL=mask_RL)
        return replace(table, rows=rows, extras=extras, is_old=is_old)

    def _joined(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return both halves of an old batch in rows of one length, each row's text at the end where it was."""
        length = max(inputs[f"input_ids_{half}"].shape[1] for half in ("chosen", "rejected"))
        fills = {"input_ids": self.pad_token_id, "attention_mask": 0}
        return {
            key: torch.cat(
                [lengthen(inputs[f"{key}_{half}"], length, fill, self.padding_side) for half in ("chosen", "rejected")]
            )
            for key, fill in fills.items()
        }


def lengthen(rows_RL: torch.Tensor, length: int, fill: int, padding_side: str) -> torch.Tensor:
    """Pad the second dimension of ``rows_RL`` with ``fill`` up to ``length``."""
    missing = length - rows_RL.shape[1]
    return pad_tensor(rows_RL, (missing, 0) if padding_side == "left" else (0, missing), value=fill)


def unread_pairs(count: int, device: torch.device) -> Batch:
    """Return the table of ``count`` pairs in a batch of the user's own making."""
    return _pairs(count, device, torch.ones(2 * count, 1, device=device), None)


def _pairs(count: int, device: torch.device, mask_RL: torch.Tensor, margin_P: torch.Tensor | None) -> Batch:
    """Return the table of ``count`` pairs whose chosen sequences are in the first rows."""
    grade_P12 = np.tile(np.array([1.0, 0.0], np.float32), (count, 1, 1))
    table = compare(Labels(grade_P12), ComparisonRule()).map_tensors(lambda array: torch.from_numpy(array).to(device))
    if margin_P is not None:
        table = replace(table, margin_C=margin_P.float().view(count))
    row_S = by_answer(count, 2).to(device)
    tokens_S = mask_RL.sum(-1, dtype=torch.int32)[row_S]
    return Batch(TokenRows(None, row_S.int(), tokens_S - 1, tokens_S), table)


def by_answer(count: int, answers: int) -> torch.Tensor:
    """Return the row of each scored position in TRL's order, in which all first answers come first, [S]."""
    return torch.arange(count * answers).view(answers, count).T.flatten()
