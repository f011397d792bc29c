"""One batch: rows of tokens, the positions where rewards are read, and a table of comparisons.

A collator makes all micro-batches of a batch at once. A user's code that reads batches is given TRL's dict instead:
`input_ids` and `attention_mask` [K P, L], all first answers before all second ones, and `margin` [P].
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad as pad_tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import UserError
from ..packing.rows import Arrays, TokenRows
from .comparisons import ComparisonRule, Comparisons, compare, pairs_of
from .measure import NO_LABEL

OLD_KEYS = ("input_ids_chosen", "attention_mask_chosen", "input_ids_rejected", "attention_mask_rejected")
"""Keys of a batch in TRL up to 0.23."""


@dataclass(frozen=True)
class Batch(Arrays):
    """One micro-batch: P rows of the data, or the part of a batch's rows that these rows of tokens hold.

    It moves to a device as a tensor does: accelerate calls `to`, and a DataLoader that pins memory `pin_memory`.
    """

    rows: TokenRows[Any]
    table: Comparisons[Any]
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of a batch that a user's collator made; the model is given them."""

    def is_there_P(self) -> Any:
        """Return which rows of the data are in this micro-batch, [P]."""
        return self.rows.tokens_S.reshape(-1, self.table.answers).any(-1)

    def to(self, device: Any, non_blocking: bool = False) -> "Batch":
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        return self.map_tensors(torch.Tensor.pin_memory)


_PARTS, _FILL = "micro_batches", "pad_token_id"


class CollatedBatch(dict[str, Any]):
    """A batch of our collators, which is a dict since loaders and transformers handle dicts.

    The sum of its micro-batches' losses is the batch's loss, and the sum of their gradients its gradient; all but the
    last only accumulate gradients. `input_ids` and `attention_mask` are made on request, padded and in TRL's order,
    for scripts that look at a batch.
    """

    @classmethod
    def of(cls, *parts: Batch, pad_token_id: int) -> "CollatedBatch":
        return cls({_PARTS: parts, _FILL: pad_token_id})

    @property
    def parts(self) -> tuple[Batch, ...]:
        """The micro-batches, in order."""
        return tuple(self[_PARTS])

    def __missing__(self, key: str) -> torch.Tensor:
        if key not in ("input_ids", "attention_mask"):
            raise KeyError(f"{key!r} is not in this batch, which has input_ids and attention_mask.")
        rows = [torch.from_numpy(ids).long() for ids in _sequences(self.parts)]
        rows = rows if key == "input_ids" else list(map(torch.ones_like, rows))
        padded_RL = pad_sequence(rows, batch_first=True, padding_value=self[_FILL] if key == "input_ids" else 0)
        return padded_RL.to(self.parts[0].rows.input_ids_RL.device)


def _sequences(parts: Sequence[Batch]) -> list[np.ndarray]:
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


def parts_of(inputs: Any) -> tuple[Batch, ...]:
    """Return the micro-batches of our collators' batch, whatever became of its class; none of a batch of another's."""
    parts: Any = inputs.get(_PARTS) if isinstance(inputs, Mapping) else None
    is_ours = isinstance(parts, tuple | list) and all(isinstance(part, Batch) for part in parts)
    return tuple(parts) if is_ours else ()


def batches_in(inputs: Mapping[str, Any], pad_token_id: int, padding_side: str = "right") -> Sequence[Batch]:
    """Return the micro-batches of what a loader gave; a dict of the user's making is one, see `read_dict`."""
    return parts_of(inputs) or [read_dict(inputs, pad_token_id, padding_side)]


def apart(inputs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the parts of a batch that are computed one at a time: each micro-batch, or a user's batch as it is."""
    parts = parts_of(inputs)
    yield from (CollatedBatch.of(part, pad_token_id=inputs[_FILL]) for part in parts) if parts else (inputs,)


def tensors_in(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tensors of a part from `apart` by name."""
    parts = parts_of(inputs)
    return parts[0].tensors() if parts else inputs


# ---- TRL's dict

TABLE = "trl_tpu_comparisons"
"""Key of a `Batch` without tokens in a padded batch whose comparisons TRL's keys do not tell; at first of None."""


def read_dict(inputs: Mapping[str, Any], pad_token_id: int, padding_side: str = "right") -> Batch:
    """Read a padded batch in TRL's form, of today or up to 0.23: made by a user's collator, or for a user's code.

    Every key but TRL's own belongs to the user or the model.

    Args:
        pad_token_id, padding_side: Pad the halves of the old form to a common length.

    Raises:
        UserError: The batch has lost its labels.
    """
    is_old = "input_ids" not in inputs
    tokens = {name: inputs[name] for name in (OLD_KEYS if is_old else ("input_ids", "attention_mask"))}
    if is_old:
        length = max(tensor.shape[1] for tensor in tokens.values())
        halves = list(lengthen(tokens, length, pad_token_id, padding_side).values())
        input_ids_RL, mask_RL = torch.cat(halves[::2]), torch.cat(halves[1::2])
    else:
        input_ids_RL, mask_RL = tokens.values()
    batch, own = inputs.get(TABLE), {*tokens, TABLE, "margin", "return_loss"}
    if TABLE in inputs and batch is None:
        raise UserError(
            "The data has grades or `chosen_probability`, which a batch of `trainer.data_collator` does not hold. "
            "Take batches from `trainer.get_train_dataloader()` or `get_eval_dataloader()`."
        )
    if not isinstance(batch, Batch):
        batch = batch_of_pairs(len(input_ids_RL) // 2, input_ids_RL.device, mask_RL, inputs.get("margin"))
    elif batch.table.has_baseline:
        own |= {"labels"}  # by which the model would compute a loss of its own
    # in TRL up to 0.23 other keys went nowhere
    extras = {} if is_old else {key: value for key, value in inputs.items() if key not in own}
    rows = replace(batch.rows, input_ids_RL=input_ids_RL, attention_mask_RL=mask_RL)
    return replace(batch, rows=rows, extras=extras)


def lengthen(
    tensors: Mapping[str, torch.Tensor], length: int, pad_token_id: int, padding_side: str
) -> dict[str, torch.Tensor]:
    """Pad token ids, attention masks and labels of tokens up to ``length``."""
    longer = {}
    for name, rows_RL in tensors.items():
        fill = pad_token_id if name.startswith("input_ids") else NO_LABEL if name == "labels" else 0
        missing = length - rows_RL.shape[1]
        longer[name] = pad_tensor(rows_RL, (missing, 0) if padding_side == "left" else (0, missing), value=fill)
    return longer


def batch_of_pairs(
    count: int, device: torch.device, mask_RL: torch.Tensor | None = None, margin_P: torch.Tensor | None = None
) -> Batch:
    """Return pairs, without their tokens, whose chosen sequences are in the first rows of a padded batch.

    Args:
        mask_RL: The attention mask; by default the sequences' lengths are not known.
        margin_P: Target margins.
    """
    table = compare(pairs_of(count), ComparisonRule()).map_tensors(lambda array: torch.from_numpy(array).to(device))
    if margin_P is not None:
        table = replace(table, margin_C=margin_P.float().view(count))
    row_S = by_answer(count, 2).to(device)
    mask_RL = torch.ones(2 * count, 1, device=device) if mask_RL is None else mask_RL
    tokens_S = mask_RL.sum(-1, dtype=torch.int32)[row_S]
    return Batch(TokenRows(None, row_S.int(), tokens_S - 1, tokens_S), table)


def by_answer(count: int, answers: int) -> torch.Tensor:
    """Return the row of each scored position in TRL's order, in which all first answers come first, [S]."""
    return torch.arange(count * answers).view(answers, count).T.flatten()
