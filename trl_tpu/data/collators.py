"""TRL's dict of a batch, for code of users that reads batches: its collators of today and up to 0.23, and its reader.

Our own batches are made by `trl_tpu.data.collate`. Rows in the columns of TRL up to 0.23 are converted here too.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad as pad_tensor
from transformers import PreTrainedTokenizerBase
from transformers.data.data_collator import DataCollatorMixin
from transformers.utils import PaddingStrategy

from ..errors import UserError
from ..packing.batch import Batch, Comparisons
from ..packing.shapes import round_up
from . import checks
from .chat_templates import maybe_apply_chat_template
from .checks import RAW_COLUMNS, PairKind, Row
from .collate import ComparisonRule, Example, Part, compare, pairs_of, sequences_of
from .length_stats import NO_LABEL, OLD_KEYS, PAIR, SOLUTION, answers_of, labels_of, row_format_of

Collate = Callable[[list[Any]], dict[str, Any]]


def needs_table(row: Example) -> bool:
    """Tell whether a prepared row has labels that no key of TRL's batches holds, so that a table has to."""
    return bool({"grades", "chosen_probability"} & labels_of(row).keys())


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
        sequences = list(map(answers_of, examples))
        answers = self.answers or max(map(len, sequences))
        rows = [each[k] if k < len(each) else each[0] for k in range(answers) for each in sequences]
        length = round_up(max(len(ids) for ids in rows), self.pad_to_multiple_of or 1)
        batch = {
            "input_ids": torch.tensor([[*ids, *[self.pad_token_id] * (length - len(ids))] for ids in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in rows]),
        }
        if "margin" in examples[0]:
            batch["margin"] = torch.tensor([example["margin"] for example in examples], dtype=torch.float)
        return batch | dict.fromkeys([TABLE] if needs_table(examples[0]) else [])


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
        part = self.part or Part(len(examples))
        own = part.of(examples[:real])
        filled = own + [examples[0]] * (part.pairs - len(own))
        batch = dict(self.collate([*map(old_columns, filled)] if self.is_old else filled))
        is_short = len(own) < part.pairs or len(examples) < part.pairs * part.count
        if (needs_table(examples[0]) or is_short) and {"input_ids", "input_ids_chosen"} & batch.keys():
            table = part.table(examples[:real], examples[0], self.rule)
            batch[TABLE] = self._positions(batch, own, table).map_tensors(torch.from_numpy)
        return self._lengthened(batch, has_steps=row_format_of(examples[0]) == SOLUTION)

    def _positions(
        self, batch: Mapping[str, Any], rows: Sequence[Example], table: Comparisons[np.ndarray]
    ) -> Batch[np.ndarray]:
        """Return a process's rows without the tokens: where their rewards are read in TRL's order."""
        pairs = len(table.row_weight_P)
        row_PK, column_PK, tokens_PK = np.zeros((3, pairs, self.rule.answers), np.int32)
        for place, row in enumerate(rows):
            if row_format_of(row):
                lengths = np.concatenate(sequences_of([row], self.pad_token_id, table).tokens)
            elif "attention_mask" in batch:  # the user's own columns
                lengths = batch["attention_mask"][place::pairs].sum(-1).numpy()
            else:
                lengths = np.array([batch[key][place].sum().item() for key in OLD_KEYS[1::2]])
            here = place, slice(len(lengths))
            row_PK[here], column_PK[here] = place + pairs * np.arange(len(lengths)), lengths - 1
            if table.kind == "steps":
                row_PK[here], column_PK[here] = place, (batch["labels"][place] != NO_LABEL).nonzero().flatten()
            tokens_PK[here] = lengths
        no_tokens: Any = None
        present_P: Any = tokens_PK.any(-1)
        return Batch(no_tokens, row_PK.ravel(), column_PK.ravel(), tokens_PK.ravel(), table.among(present_P))

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


def batches_in(inputs: Any, pad_token_id: int, padding_side: str = "right") -> Sequence[Batch[torch.Tensor]]:
    """Return the micro-batches of what a loader gave; a dict of the user's making is one, see `read_dict`."""
    return inputs.parts if isinstance(inputs, Batch) else [read_dict(inputs, pad_token_id, padding_side)]


TABLE = "trl_tpu_comparisons"
"""Key of a `Batch` without tokens in a padded batch whose comparisons TRL's keys do not tell; at first of None."""


def read_dict(inputs: Mapping[str, Any], pad_token_id: int, padding_side: str = "right") -> Batch[torch.Tensor]:
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
    elif batch.table.kind == "steps":
        own |= {"labels"}  # by which the model would compute a loss of its own
    # in TRL up to 0.23 other keys went nowhere
    extras = {} if is_old else {key: value for key, value in inputs.items() if key not in own}
    tokens = {"input_ids_RL": input_ids_RL, "attention_mask_RL": mask_RL, "pad_token_id": pad_token_id}
    return replace(batch, **tokens, extras=extras)


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
) -> Batch[torch.Tensor]:
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
    no_tokens: Any = None
    return Batch(no_tokens, row_S.int(), tokens_S - 1, tokens_S, table)


def by_answer(count: int, answers: int) -> torch.Tensor:
    """Return the row of each scored position in TRL's order, in which all first answers come first, [S]."""
    return torch.arange(count * answers).view(answers, count).T.flatten()


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
        return batch | dict.fromkeys([TABLE] if needs_table(features[0]) else [])


OLD_IDS = OLD_KEYS[::2]


def read_old_row(row: Row, index: int, num_embeddings: int, name: str) -> dict[str, Any]:
    """Return the columns of today for a pair in the columns of TRL up to 0.23.

    Tokens that an attention mask leaves out are no part of an answer, and a margin may be a list of one.

    Raises:
        UserTypeError: A value is not a list of integers.
        UserError: The model lacks a token id, or a mask has a hole or another length.
    """
    answers = dict[str, Any]()
    for new, old in zip(PAIR, OLD_IDS, strict=True):
        ids, mask, where = row[old], row[old.replace("input_ids", "attention_mask")], checks.row_of(index, name, old)
        checks.check_ids(ids, where, num_embeddings)
        kept = np.flatnonzero(mask)
        if not len(kept) or len(mask) != len(ids) or len(kept) != np.ptp(kept) + 1:
            raise UserError(
                f"{where}: the attention mask must be as long as the token ids, and 0 only before or after all tokens "
                f"that count, got {mask!r:.80}."
            )
        answers[new] = list(ids[kept[0] : kept[-1] + 1])
    return answers | old_margin(row, checks.row_of(index, name))


def old_margin(row: Row, where: str) -> dict[str, float]:
    """Return the margin, if any, of a row for TRL up to 0.23, which may be a list of one number.

    Raises:
        UserError: It is not finite, or a list of several.
    """
    if "margin" not in row:
        return {}
    margin = np.asarray(row["margin"])
    margin = margin[0] if margin.shape == (1,) else margin
    checks.check_margin(margin, f"{where}: `margin`")
    return {"margin": float(margin)}


_OLD_TOKEN_COLUMNS = {"chosen_input_ids": "chosen_ids", "rejected_input_ids": "rejected_ids"}


def rename_old_columns(dataset: Any, columns: list[str]) -> tuple[Any, list[str]]:
    """Give a dataset's columns of token ids the names that they have in TRL today; return its columns too."""
    if not set(_OLD_TOKEN_COLUMNS) <= set(columns) or set(PAIR) <= set(columns):
        return dataset, columns
    warnings.warn(
        "The columns `chosen_input_ids` and `rejected_input_ids` are deprecated and will not be supported in v1 "
        "of TRL: rename them to `chosen_ids` and `rejected_ids`.",
        FutureWarning,
        stacklevel=4,
    )
    return dataset.rename_columns(_OLD_TOKEN_COLUMNS), [_OLD_TOKEN_COLUMNS.get(each, each) for each in columns]


@dataclass(frozen=True)
class OldPairKind(PairKind):
    """Raw pairs that are tokenized as in TRL up to 0.23: without the prompt and an added end-of-sequence token."""

    tokenizer: PreTrainedTokenizerBase
    has_traps = False

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        super().raw_answers(row, where)
        with checks.rendering(where):
            rendered = maybe_apply_chat_template(dict(row), self.tokenizer)
        return {column: rendered[column] for column in RAW_COLUMNS}

    def dialogue(self, row: Row, answer: Any, tokenizer: Any) -> Any:
        return answer

    def tokenized(self, row: Row, ids_K: list[list[int]], where: str) -> dict[str, Any]:
        return super().tokenized(row, ids_K, where) | old_margin(row, where)


def _tokenize(batch: Row, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Tokenize a batch of ``chosen`` and ``rejected`` texts into the columns of TRL up to 0.23, where it is public."""
    tokens = [tokenizer(list(batch[half])) for half in RAW_COLUMNS]
    return dict(zip(OLD_KEYS, [each[key] for each in tokens for key in ("input_ids", "attention_mask")], strict=True))


def old_columns(row: Example) -> Example:
    """Return a tokenized pair in the columns of TRL up to 0.23, with its other columns, for collators of users."""
    if row_format_of(row) != PAIR:
        return row
    chosen, rejected = (row[column] for column in PAIR)
    halves = zip(OLD_KEYS, (chosen, [1] * len(chosen), rejected, [1] * len(rejected)), strict=True)
    return {name: value for name, value in row.items() if name not in PAIR} | dict(halves)
