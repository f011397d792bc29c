"""Batches as TRL's dict, for user code that reads them: TRL's collator, and a reader.

The package's own batches are made by `trl_tpu.data.collate`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad as pad_tensor
from transformers.data.data_collator import DataCollatorMixin

from ..errors import UserError
from ..packing.batch import Batch, Comparisons
from ..packing.shapes import round_up
from .checks import OLD_KEYS, Row
from .collate import ComparisonRule, Part, compare, pairs_of, sequences_of
from .kinds import Pairs, answers_of, kind_of, labels_of
from .kinds.solutions import NO_LABEL

Collate = Callable[[list[Any]], dict[str, Any]]


def needs_table(row: Row) -> bool:
    """Check whether a prepared row has labels that TRL's batch keys cannot hold, so its batch needs a table."""
    return bool(labels_of(row).keys() - {"margin"})


@dataclass
class DataCollatorForPreference(DataCollatorMixin):
    """Collator of tokenized pairs into 2P right-padded rows: first P chosen sequences, then P rejected sequences.

    Each row has `chosen_ids` and `rejected_ids`, lists of token ids, and may have a float `margin` (read if the first
    row has it). The batch has `input_ids` and `attention_mask`, [2P, longest], and `margin`, [P].

    Args:
        pad_token_id: Id of padding tokens.
        pad_to_multiple_of: Round the batch's length up to a multiple of this number.
        return_tensors: Only ``"pt"``.
        answers: K, the number of answers per ranking; by default the most answers of any row. The batch has K P token
            rows: all first answers, then all second answers, and so on. A ranking with fewer answers repeats its first
            answer.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    answers: int | None = None

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        sequences = list(map(answers_of, examples))
        answers = self.answers or max(map(len, sequences))
        ids_R = [ids_K[k] if k < len(ids_K) else ids_K[0] for k in range(answers) for ids_K in sequences]
        length = round_up(max(map(len, ids_R)), self.pad_to_multiple_of or 1)
        batch = {
            "input_ids": torch.tensor([[*ids, *[self.pad_token_id] * (length - len(ids))] for ids in ids_R]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in ids_R]),
        }
        if "margin" in examples[0]:
            batch["margin"] = torch.tensor([row["margin"] for row in examples], dtype=torch.float)
        return batch | dict.fromkeys([TABLE] if needs_table(examples[0]) else [])


@dataclass(frozen=True)
class DictCollator:
    """Collator of padded batches in TRL's form, made by TRL's or the user's collator, for user code that reads them.

    Args:
        collate: Collator from rows in TRL's columns to TRL's dict.
        is_old: Whether ``collate`` reads the columns of TRL up to 0.23.
        rule: Settings that define the comparisons, for labels that TRL's keys cannot hold.
        pad_token_id: Id of padding tokens.
        padding_side: The side on which ``collate`` pads.
        lengths: Planned lengths, as in `pad`.
        part: This process's part of the rows, as in `BatchCollator`.
    """

    collate: Collate
    is_old: bool
    rule: ComparisonRule
    pad_token_id: int
    padding_side: str = "right"
    lengths: tuple[int, ...] | None = None
    part: Part | None = None

    def __call__(self, rows: Sequence[Row], real: int | None = None) -> dict[str, Any]:
        """Make the batch from the first ``real`` rows; the remaining rows are padding."""
        part = self.part or Part(len(rows))
        own_rows = part.of(rows[:real])
        padded = own_rows + [rows[0]] * (part.rows - len(own_rows))
        batch = dict(self.collate([*map(old_columns, padded)] if self.is_old else padded))
        is_short = len(own_rows) < part.rows or len(rows) < part.rows * part.count
        if (needs_table(rows[0]) or is_short) and {"input_ids", "input_ids_chosen"} & batch.keys():
            table = part.table(rows[:real], self.rule)
            batch[TABLE] = self._scored_positions(batch, own_rows, table).map_tensors(torch.from_numpy)
        return self._pad_to_planned_length(batch)

    def _scored_positions(
        self, batch: Mapping[str, Any], rows: Sequence[Row], table: Comparisons[np.ndarray]
    ) -> Batch[np.ndarray]:
        """Return a batch without tokens: the positions, in TRL's order, at which the rows' rewards are read."""
        count = len(table.row_weight_P)
        token_row_PK, column_PK, tokens_PK = np.zeros((3, count, self.rule.answers), np.int32)
        labels_PL = batch.get("labels") if table.kind.is_one_sequence else None  # the collator pads them, too
        for place, row in enumerate(rows):
            if kind_of(row):
                lengths = np.concatenate(sequences_of([row], self.pad_token_id, table).tokens)
            elif "attention_mask" in batch:  # rows with the user's columns
                lengths = batch["attention_mask"][place::count].sum(-1).numpy()
            else:
                lengths = np.array([batch[key][place].sum().item() for key in OLD_KEYS[1::2]])
            index = place, slice(len(lengths))
            token_row_PK[index], column_PK[index] = place + count * np.arange(len(lengths)), lengths - 1
            if labels_PL is not None:
                ends = (labels_PL[place] != NO_LABEL).nonzero().flatten()
                token_row_PK[index], column_PK[index] = place, ends if len(ends) else 0
            tokens_PK[index] = lengths
        no_tokens: Any = None
        present_P: Any = tokens_PK.any(-1)
        return Batch(no_tokens, token_row_PK.ravel(), column_PK.ravel(), tokens_PK.ravel(), table.among(present_P))

    def _pad_to_planned_length(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Pad to the shortest planned length that fits; a batch longer than all planned lengths keeps its length.

        A batch with user-defined keys also keeps its length: the values of these keys may have the same length.
        """
        names = [*(("input_ids", "attention_mask") if "input_ids" in batch else OLD_KEYS)]
        names += ["labels"] * self.rule.kind.is_one_sequence
        tensors = {name: batch[name] for name in names if name in batch}
        if not batch.keys() <= {*tensors, TABLE, "margin", "return_loss"}:
            return batch
        longest = max((tensor.shape[1] for tensor in tensors.values()), default=0)
        length = next((length for length in self.lengths or () if length >= longest), longest)
        return batch | lengthen(tensors, length, self.pad_token_id, self.padding_side)


def batches_in(inputs: Any, pad_token_id: int, padding_side: str = "right") -> Sequence[Batch[torch.Tensor]]:
    """Return the micro-batches of a loader's output; a dict is one micro-batch, see `read_dict`."""
    return inputs.parts if isinstance(inputs, Batch) else [read_dict(inputs, pad_token_id, padding_side)]


#: Key of a padded batch for comparisons that TRL's keys cannot hold: first None, then a `Batch` without tokens.
TABLE = "trl_tpu_comparisons"


def read_dict(inputs: Mapping[str, Any], pad_token_id: int, padding_side: str = "right") -> Batch[torch.Tensor]:
    """Read a padded batch in TRL's form, current or up to 0.23, made by a user's collator or for user code.

    All keys except TRL's belong to the user or the model.

    Args:
        pad_token_id, padding_side: How to pad the two halves of the old form to a common length.

    Raises:
        UserError: The batch has lost its labels.
    """
    is_old = "input_ids" not in inputs
    if is_old:
        tokens = {name: inputs[name] for name in OLD_KEYS}
        length = max(tensor.shape[1] for tensor in tokens.values())
        halves = list(lengthen(tokens, length, pad_token_id, padding_side).values())
        input_ids_RL, mask_RL = torch.cat(halves[::2]), torch.cat(halves[1::2])
    else:
        input_ids_RL, mask_RL = inputs["input_ids"], inputs["attention_mask"]
    batch, known_keys = inputs.get(TABLE), {"input_ids", "attention_mask", TABLE, "margin", "return_loss"}
    if TABLE in inputs and batch is None:
        raise UserError(
            "The data has labels that a batch of `trainer.data_collator` cannot hold: grades or `chosen_probability`. "
            "Take batches from `trainer.get_train_dataloader()` or `get_eval_dataloader()`."
        )
    if not isinstance(batch, Batch):
        batch = batch_of_pairs(len(input_ids_RL) // 2, input_ids_RL.device, mask_RL, inputs.get("margin"))
    elif batch.table.kind.is_one_sequence:
        known_keys |= {"labels"}  # with `labels`, the model would compute another loss
    # TRL up to 0.23 ignored other keys
    extras = {} if is_old else {key: value for key, value in inputs.items() if key not in known_keys}
    rows: dict[str, Any] = {"input_ids_RL": input_ids_RL, "attention_mask_RL": mask_RL, "pad_token_id": pad_token_id}
    return replace(batch, **rows, extras=extras)


def lengthen(
    tensors: Mapping[str, torch.Tensor], length: int, pad_token_id: int, padding_side: str
) -> dict[str, torch.Tensor]:
    """Pad token ids, attention masks and token labels to ``length``."""
    longer = {}
    for name, values_RL in tensors.items():
        fill = pad_token_id if name.startswith("input_ids") else NO_LABEL if name == "labels" else 0
        missing = length - values_RL.shape[1]
        longer[name] = pad_tensor(values_RL, (missing, 0) if padding_side == "left" else (0, missing), value=fill)
    return longer


def batch_of_pairs(
    count: int, device: torch.device, mask_RL: torch.Tensor | None = None, margin_P: torch.Tensor | None = None
) -> Batch[torch.Tensor]:
    """Return a batch of pairs without tokens; its token rows are all chosen sequences, then all rejected sequences.

    Args:
        mask_RL: The attention mask; by default the lengths of the sequences are unknown and count as 1.
        margin_P: Target margin of each pair.
    """
    table = compare(pairs_of(count), ComparisonRule()).map_tensors(lambda array: torch.from_numpy(array).to(device))
    if margin_P is not None:
        table = replace(table, margin_C=margin_P.float().view(count))
    token_row_S = torch.arange(2 * count, device=device).view(2, count).T.flatten()  # in TRL's order
    mask_RL = torch.ones(2 * count, 1, device=device) if mask_RL is None else mask_RL
    tokens_S = mask_RL.sum(-1, dtype=torch.int32)[token_row_S]
    no_tokens: Any = None
    return Batch(no_tokens, token_row_S.int(), tokens_S - 1, tokens_S, table)


def old_columns(row: Row) -> Row:
    """Return a tokenized pair in the columns of TRL up to 0.23, with its other columns, for users' collators."""
    if not set(Pairs.columns) <= row.keys():
        return row
    chosen, rejected = (row[column] for column in Pairs.columns)
    halves = zip(OLD_KEYS, (chosen, [1] * len(chosen), rejected, [1] * len(rejected)), strict=True)
    return {name: value for name, value in row.items() if name not in Pairs.columns} | dict(halves)
