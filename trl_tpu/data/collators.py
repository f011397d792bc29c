"""Makes batches on the host: our own, packed or padded, and TRL's two collators.

Each reads tokenized rows by `read_row`, whatever their columns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.data.data_collator import DataCollatorMixin
from transformers.utils import PaddingStrategy

from ..errors import UserError
from ..packing.pack import Scored, last_scored, pack, pack_unpadded, pad
from ..packing.rows import TokenRows
from ..packing.shapes import RowPlan, RowShape, round_up
from .batch import OLD_KEYS, TABLE, Batch, CollatedBatch, by_answer, lengthen
from .comparisons import ComparisonRule, Comparisons, Labels, compare
from .measure import NO_LABEL, PAIR, form_of, read_row

Example = Mapping[str, Any]
Collate = Callable[[list[Any]], dict[str, Any]]


def old_columns(row: Example) -> Example:
    """Return a tokenized pair in the columns of TRL up to 0.23, with its other columns, for collators of users."""
    if form_of(row) != PAIR:
        return row
    chosen, rejected = (row[column] for column in PAIR)
    halves = zip(OLD_KEYS, (chosen, [1] * len(chosen), rejected, [1] * len(rejected)), strict=True)
    return {name: value for name, value in row.items() if name not in PAIR} | dict(halves)


def are_told(row: Example) -> bool:
    """Tell whether a row of `read_row` has labels that TRL's keys of a batch do not tell."""
    return "grades" in row or "chosen_probability" in row


def scored(row: Example, pad_token_id: int) -> Scored:
    """Return the sequences of a row of `read_row`, and where their rewards are read."""
    sequences = [np.asarray(ids, np.int32) for ids in row["answers"]]
    if "step_ends" in row:
        return Scored(sequences, [np.asarray(row["step_ends"], np.int64)])
    return Scored(sequences, [np.array([last_scored(ids, pad_token_id)]) for ids in sequences])


# ---- our own batches


@dataclass(frozen=True)
class Table:
    """What makes the table of comparisons of a batch's rows.

    Args:
        rule: Settings of the loss.
        answers: K, the most answers or steps of a row.
        attributes: A; 0 where `grades` are of no attribute.
    """

    rule: ComparisonRule = ComparisonRule()
    answers: int = 2
    attributes: int = 0

    def of(self, examples: Sequence[Example], rows: int | None = None) -> Comparisons[np.ndarray]:
        """Compare the rewards of examples, in a table for as many ``rows``."""
        return compare(Labels.of(examples, self.answers, self.attributes), self.rule, rows)


@dataclass(frozen=True)
class Part:
    """The examples of a batch that one of several processes computes.

    Args:
        pairs: P of each process: with fewer examples its table is padded.
        index: Of this process.
        count: Of processes that share the batch.
    """

    pairs: int
    index: int = 0
    count: int = 1

    def of(self, examples: Sequence[Any]) -> list[Any]:
        """Return this process's examples, in the order of the batch; there may be none."""
        return list(examples[self.index * self.pairs :][: self.pairs])


@dataclass(frozen=True)
class PlannedRows:
    """Packs batches into rows of planned shapes, each shared prefix once.

    Args:
        plan: From `plan_rows`.
        pairs: P, over all processes, which take the rows of a batch and not its pairs.
        pad_token_id: Fills what rows have left.
        table: Compares rewards.
        expands: Whether attention reads rows of whole sequences: see `trl_tpu.packing.rows`.
        part: Index of this process, and how many there are.
    """

    plan: RowPlan
    pairs: int
    pad_token_id: int
    table: Table = Table()
    expands: bool = False
    part: tuple[int, int] = (0, 1)

    def __call__(self, examples: Sequence[Example]) -> CollatedBatch:
        examples = list(map(read_row, examples))
        rows = [scored(row, self.pad_token_id) for row in examples]
        settings = self.plan, self.pairs, self.pad_token_id, self.table.answers, self.expands, self.part
        table = self.table.of(examples, self.pairs)
        table = replace(table, weight_sum_1=table.weight_sum_1 / np.float32(self.part[1]))
        parts = [Batch(each, table.among(Batch(each, table).is_there_P())) for each in pack(rows, *settings)]
        return CollatedBatch.of(
            *(part.map_tensors(torch.from_numpy) for part in parts), pad_token_id=self.pad_token_id
        )


@dataclass(frozen=True)
class OwnRows:
    """Makes one micro-batch of a process's own part of a batch: packed without padding, or padded.

    Args:
        lay_out: Writes rows of tokens, given the rows of the data and P.
        pad_token_id: By which the last scored token is found.
        table: Compares rewards.
        part: The process's part; None if the examples are its own, and all of them.
    """

    lay_out: Callable[[Sequence[Scored], int], TokenRows[np.ndarray]]
    pad_token_id: int
    table: Table = Table()
    part: Part | None = None

    def __call__(self, examples: Sequence[Example], real: int | None = None) -> CollatedBatch:
        """Make the batch; of examples after the first ``real`` ones nothing is computed."""
        examples = list(map(read_row, examples))
        part = self.part or Part(len(examples))
        weights = self.table.of(examples[:real] or examples[:1]).weight_sum_1 / np.float32(part.count)
        own = part.of(examples[:real]) if self.part else list(examples[:real])
        table = replace(self.table.of(own or examples[:1], part.pairs), weight_sum_1=weights)
        rows = self.lay_out([scored(row, self.pad_token_id) for row in own or examples[:1]], part.pairs)
        if not own:  # a process with nothing to do computes a row of which nothing counts
            rows, table = replace(rows, tokens_S=0 * rows.tokens_S), table.among(np.zeros(part.pairs, bool))
        return CollatedBatch.of(Batch(rows, table).map_tensors(torch.from_numpy), pad_token_id=self.pad_token_id)


@dataclass(frozen=True)
class Unpadded:
    """Lays out one packed row without padding, for devices that take any shape."""

    pad_token_id: int
    answers: int
    attention_crossover_length: float

    def __call__(self, rows: Sequence[Scored], pairs: int) -> TokenRows[np.ndarray]:
        return pack_unpadded(rows, self.pad_token_id, pairs, self.answers, self.attention_crossover_length)


@dataclass(frozen=True)
class Padded:
    """Lays out a row for each sequence.

    Args:
        lengths: Planned lengths, ascending: rows get the shortest that fits, else the longest sequence's, and a batch
            always has its most rows. None keeps the number of sequences, too.
        rows_per_pair: Most sequences of a row of the data.
        multiple: Of lengths that are not planned.
    """

    pad_token_id: int
    answers: int
    rows_per_pair: int
    lengths: tuple[int, ...] | None = None
    multiple: int = 1

    def __call__(self, rows: Sequence[Scored], pairs: int) -> TokenRows[np.ndarray]:
        longest = max(len(ids) for row in rows for ids in row.sequences)
        length = next((each for each in self.lengths or () if each >= longest), round_up(longest, self.multiple))
        count = sum(len(row.sequences) for row in rows) if self.lengths is None else pairs * self.rows_per_pair
        return pad(rows, RowShape(count, length), pairs, self.pad_token_id, self.answers)


# ---- TRL's dict


@dataclass
class DataCollatorForPreference(DataCollatorMixin):
    """Makes one right-padded batch of 2P rows of token pairs: the P chosen sequences, then the P rejected ones.

    Each example has `chosen_ids` and `rejected_ids`, lists of token ids, and may have a float `margin` (read when the
    first example has it). The batch has `input_ids` and `attention_mask`, [2P, longest], and `margin`, [P].

    Args:
        pad_token_id: The id to pad with.
        pad_to_multiple_of: Round the batch's length up to a multiple of this.
        return_tensors: Only ``"pt"``.
        answers: K, of rankings: then there are K P rows, all first answers and so on, with copies of a row's first
            answer in place of those that it does not have. By default the most answers of any example.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    answers: int | None = None

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        sequences = [read_row(example)["answers"] for example in examples]
        answers = self.answers or max(map(len, sequences))
        rows = [each[k] if k < len(each) else each[0] for k in range(answers) for each in sequences]
        length = round_up(max(len(ids) for ids in rows), self.pad_to_multiple_of or 1)
        batch = {
            "input_ids": torch.tensor([[*ids, *[self.pad_token_id] * (length - len(ids))] for ids in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in rows]),
        }
        if "margin" in examples[0]:
            batch["margin"] = torch.tensor([example["margin"] for example in examples], dtype=torch.float)
        return batch | dict.fromkeys([TABLE] if are_told(read_row(examples[0])) else [])


@dataclass
class RewardDataCollatorWithPadding:
    """Pads the two halves of the pairs, each on the tokenizer's side: TRL's collator up to 0.23.

    Each example has `input_ids_chosen`, `attention_mask_chosen`, `input_ids_rejected` and `attention_mask_rejected`,
    and may have a `margin`, a float or a list of one. The batch has the same keys, [P, longest of that half],
    `margin`, [P], and ``return_loss=True``.

    Args:
        tokenizer: Pads, with its own pad token and side.
        padding: As in the tokenizer's ``pad``: True or "longest", "max_length", or False.
        max_length: The length that ``padding="max_length"`` pads to (TRL up to 0.11).
        pad_to_multiple_of: Round lengths up to a multiple of this.
        return_tensors: Only ``"pt"``.

    Raises:
        UserError: If an example lacks one of the four columns.
    """

    tokenizer: PreTrainedTokenizerBase
    padding: bool | str | PaddingStrategy = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        if missing := [key for key in OLD_KEYS if any(key not in feature for feature in features)]:
            raise UserError(
                f"The features should include {', '.join(OLD_KEYS)}, but {', '.join(missing)} is missing; found "
                f"{', '.join(features[0])}."
            )
        batch: dict[str, Any] = {}
        for half in ("chosen", "rejected"):
            padded = self.tokenizer.pad(
                [{key: feature[f"{key}_{half}"] for key in ("input_ids", "attention_mask")} for feature in features],
                padding=self.padding,
                max_length=self.max_length,
                pad_to_multiple_of=self.pad_to_multiple_of,
                return_tensors=self.return_tensors,
            )
            batch |= {f"{key}_{half}": padded[key] for key in ("input_ids", "attention_mask")}
        batch["return_loss"] = True
        if "margin" in features[0]:
            margins = torch.tensor([feature["margin"] for feature in features], dtype=torch.float)
            batch["margin"] = margins.view(len(features))  # [P, 1] would be subtracted from every pair, as [P, P]
        return batch | dict.fromkeys([TABLE] if are_told(features[0]) else [])


@dataclass(frozen=True)
class ForUsersCode:
    """Makes padded batches in TRL's form, by TRL's collator or a user's, for code of the user's that reads them.

    Args:
        collate: Examples in TRL's columns -> TRL's dict.
        is_old: Whether ``collate`` reads the columns of TRL up to 0.23.
        table: Compares rewards, where TRL's keys do not say which.
        pad_token_id: Fills token ids.
        padding_side: Where ``collate`` pads.
        lengths: Planned lengths, as in `Padded`.
        part: As in `OwnRows`.
    """

    collate: Collate
    is_old: bool
    table: Table
    pad_token_id: int
    padding_side: str = "right"
    lengths: tuple[int, ...] | None = None
    part: Part | None = None

    def __call__(self, examples: Sequence[Example], real: int | None = None) -> dict[str, Any]:
        """Make the batch; examples after the first ``real`` ones do not count."""
        part = self.part or Part(len(examples))
        own = part.of(examples[:real]) if self.part else list(examples[:real])
        filled = [*own, *[examples[0]] * (part.pairs - len(own))]
        batch = dict(self.collate([*map(old_columns, filled)] if self.is_old else filled))
        rows, own = list(map(read_row, examples)), list(map(read_row, own))
        is_told = are_told(rows[0])
        is_short = len(own) < part.pairs or len(examples) < part.pairs * part.count
        if (is_told or is_short) and {"input_ids", "input_ids_chosen"} & batch.keys():
            batch[TABLE] = self._table(batch, rows[:real] or rows[:1], own, part).map_tensors(torch.from_numpy)
        return self._lengthened(batch, "step_ends" in rows[0])

    def _table(self, batch: Mapping[str, Any], examples: Sequence[Example], own: list[Example], part: Part) -> Batch:
        weights = self.table.of(examples).weight_sum_1 / np.float32(part.count)
        table = self.table.of(own or examples[:1], part.pairs).among(np.arange(part.pairs) < len(own))
        answers, tokens_SP = self.table.answers, np.zeros((part.pairs, self.table.answers), np.int32)
        row_S = by_answer(part.pairs, answers).numpy().astype(np.int32)
        column_SP = np.zeros_like(tokens_SP)
        if "step_ends" in examples[0]:
            row_S = np.arange(part.pairs, dtype=np.int32).repeat(answers)
        for place, row in enumerate(own):
            if "step_ends" in row:
                ends = (batch["labels"][place] != NO_LABEL).nonzero().flatten().numpy()
                column_SP[place, : len(ends)] = ends
                tokens_SP[place, : len(ends)] = np.diff([0, *(ends[:-1] + 1), len(row["answers"][0])])[: len(ends)]
            else:
                lengths = _lengths(batch, row, place, part.pairs)
                tokens_SP[place, : len(lengths)], column_SP[place, : len(lengths)] = lengths, lengths - 1
        rows = TokenRows(None, row_S, column_SP.ravel(), tokens_SP.ravel())
        return Batch(rows, replace(table, weight_sum_1=weights))

    def _lengthened(self, batch: dict[str, Any], has_steps: bool) -> dict[str, Any]:
        """Pad to the shortest planned length that fits; a batch longer than all keeps its own length.

        So does one with keys of a user's, which may be as long.
        """
        names = ("input_ids", "attention_mask") if "input_ids" in batch else OLD_KEYS
        fills = {key: self.pad_token_id if key.startswith("input_ids") else 0 for key in names if key in batch}
        fills |= {"labels": NO_LABEL} if has_steps and "labels" in batch else {}
        if not batch.keys() <= {*fills, TABLE, "margin", "return_loss"}:
            return batch
        longest = max((batch[key].shape[1] for key in fills), default=0)
        length = next((length for length in self.lengths or () if length >= longest), longest)
        return batch | {key: lengthen(batch[key], length, fill, self.padding_side) for key, fill in fills.items()}


def _lengths(batch: Mapping[str, Any], row: Example, place: int, pairs: int) -> np.ndarray:
    """Return the length of each answer of a row, from its token ids or, in columns of a user's, from the batch."""
    if "answers" in row:
        return np.array([len(ids) for ids in row["answers"]])
    if "attention_mask" in batch:
        return batch["attention_mask"][place::pairs].sum(-1).numpy()
    return np.array([batch[key][place].sum().item() for key in OLD_KEYS[1::2]])
