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
from ..packing.pack import Scored, last_scored
from ..packing.rows import TokenRows
from ..packing.shapes import round_up
from .batch import OLD_KEYS, TABLE, Batch, CollatedBatch, lengthen
from .comparisons import ComparisonRule, Comparisons
from .measure import NO_LABEL, PAIR, form_of, read_row

Example = Mapping[str, Any]
Collate = Callable[[list[Any]], dict[str, Any]]
LayOut = Callable[..., list[TokenRows[np.ndarray]]]


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

    def table(self, own: Sequence[Example], every: Sequence[Example], rule: ComparisonRule) -> Comparisons[np.ndarray]:
        """Compare the rewards of this process's rows, which get their share of the weights of all rows.

        Args:
            own: Rows of this process, at least one.
            every: Rows of all processes.
            rule: Compares rewards.
        """
        table = rule.table(own, self.pairs)
        total = table if len(own) == len(every) else rule.table(every)
        return replace(table, weight_sum_1=total.weight_sum_1 / np.float32(self.count))


def micro_batch(tokens: TokenRows[np.ndarray], table: Comparisons[np.ndarray]) -> Batch:
    """Return the micro-batch in which only those rewards of ``table`` count that ``tokens`` has."""
    batch = Batch(tokens, table)
    return replace(batch, table=table.among(batch.is_there_P())).map_tensors(torch.from_numpy)


@dataclass(frozen=True)
class BatchCollator:
    """Makes our own batches, packed or padded.

    Args:
        lay_out: Writes rows of tokens: `pack`, `pack_unpadded` or `pad`, with their settings.
        pad_token_id: Fills rows. A sequence is scored at its last other token.
        rule: Compares rewards.
        part: The process's part of the examples; None if all examples are its own. Processes that share the rows of
            one packed batch each take all examples, and write their own rows.
    """

    lay_out: LayOut
    pad_token_id: int
    rule: ComparisonRule = ComparisonRule()
    part: Part | None = None

    def __call__(self, examples: Sequence[Example], real: int | None = None) -> CollatedBatch:
        """Make the batch; of examples after the first ``real`` ones nothing is computed."""
        part, rows = self.part or Part(len(examples)), list(map(read_row, examples))
        every = rows[:real]
        if len(every) > part.pairs * part.count:
            raise UserError(
                f"A batch has at most {part.pairs * part.count} rows, as its shapes were planned; got {len(every)}."
            )
        own = part.of(every)
        settings = {"pad_token_id": self.pad_token_id, "most_pairs": part.pairs, "answers": self.rule.answers}
        laid_out = self.lay_out([scored(row, self.pad_token_id) for row in own or rows[:1]], **settings)
        if not own:  # a process with nothing to do computes a row of which nothing counts
            laid_out = [replace(tokens, tokens_S=0 * tokens.tokens_S) for tokens in laid_out]
        table = part.table(own or rows[:1], every or rows[:1], self.rule)
        parts = (micro_batch(tokens, table) for tokens in laid_out)
        return CollatedBatch.of(*parts, pad_token_id=self.pad_token_id)


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
class DictCollator:
    """Makes padded batches in TRL's form, by TRL's collator or a user's, for a user's code that reads them.

    Args:
        collate: Examples in TRL's columns -> TRL's dict.
        is_old: Whether ``collate`` reads the columns of TRL up to 0.23.
        rule: Compares rewards, where TRL's keys do not say which.
        pad_token_id: Fills token ids.
        padding_side: Where ``collate`` pads.
        lengths: Planned lengths, as in `pad`.
        part: As in `BatchCollator`.
    """

    collate: Collate
    is_old: bool
    rule: ComparisonRule
    pad_token_id: int
    padding_side: str = "right"
    lengths: tuple[int, ...] | None = None
    part: Part | None = None

    def __call__(self, examples: Sequence[Example], real: int | None = None) -> dict[str, Any]:
        """Make the batch; examples after the first ``real`` ones do not count."""
        part, rows = self.part or Part(len(examples)), list(map(read_row, examples))
        own = part.of(rows[:real])
        filled = part.of(examples[:real]) + [examples[0]] * (part.pairs - len(own))
        batch = dict(self.collate([*map(old_columns, filled)] if self.is_old else filled))
        is_short = len(own) < part.pairs or len(examples) < part.pairs * part.count
        if (are_told(rows[0]) or is_short) and {"input_ids", "input_ids_chosen"} & batch.keys():
            tokens = self._positions(batch, own, part.pairs)
            batch[TABLE] = micro_batch(tokens, part.table(own or rows[:1], rows[:real] or rows[:1], self.rule))
        return self._lengthened(batch, "step_ends" in rows[0])

    def _positions(self, batch: Mapping[str, Any], rows: Sequence[Example], pairs: int) -> TokenRows[np.ndarray]:
        """Return where the rewards of a process's rows are read in TRL's order, without the tokens."""
        row_PK, column_PK, tokens_PK = np.zeros((3, pairs, self.rule.answers), np.int32)
        for place, row in enumerate(rows):
            if "answers" in row:
                lengths = np.concatenate(scored(row, self.pad_token_id).tokens)
            elif "attention_mask" in batch:  # the user's own columns
                lengths = batch["attention_mask"][place::pairs].sum(-1).numpy()
            else:
                lengths = np.array([batch[key][place].sum().item() for key in OLD_KEYS[1::2]])
            here = place, slice(len(lengths))
            row_PK[here], column_PK[here] = place + pairs * np.arange(len(lengths)), lengths - 1
            if "step_ends" in row:
                row_PK[here], column_PK[here] = place, (batch["labels"][place] != NO_LABEL).nonzero().flatten()
            tokens_PK[here] = lengths
        no_tokens: Any = None
        return TokenRows(no_tokens, row_PK.ravel(), column_PK.ravel(), tokens_PK.ravel())

    def _lengthened(self, batch: dict[str, Any], has_steps: bool) -> dict[str, Any]:
        """Pad to the shortest planned length that fits; a batch longer than all keeps its own length.

        A batch with keys of a user's keeps its length too: they may be as long.
        """
        names = [*(("input_ids", "attention_mask") if "input_ids" in batch else OLD_KEYS), *["labels"] * has_steps]
        tensors = {name: batch[name] for name in names if name in batch}
        if not batch.keys() <= {*tensors, TABLE, "margin", "return_loss"}:
            return batch
        longest = max((tensor.shape[1] for tensor in tensors.values()), default=0)
        length = next((length for length in self.lengths or () if length >= longest), longest)
        return batch | lengthen(tensors, length, self.pad_token_id, self.padding_side)
