"""Makes batches on the host: TRL's two collators, and those that pad or pack pairs to planned shapes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad as pad_tensor
from transformers import PreTrainedTokenizerBase
from transformers.data.data_collator import DataCollatorMixin
from transformers.utils import PaddingStrategy

from ..errors import UserError
from ..packing.pack import pack, pack_unpadded
from ..packing.schedule import RowPlan
from ..packing.shapes import round_up
from .judgements import OURS, add_labels, answers_in, is_ours, labels_in, labels_of, weights_of
from .measure import NO_LABEL, dialogues_in
from .packed_batch import PackedBatch, PackedInputs

LEGACY_KEYS = ("input_ids_chosen", "attention_mask_chosen", "input_ids_rejected", "attention_mask_rejected")


@dataclass
class DataCollatorForPreference(DataCollatorMixin):
    """Makes one right-padded batch of 2P rows of token pairs: the P chosen dialogues, then the P rejected ones.

    Each example has `chosen_ids` and `rejected_ids`, lists of token ids, and may have a float `margin` (read when the
    first example has it). The batch has `input_ids` and `attention_mask`, [2P, longest], and `margin`, [P].

    Args:
        pad_token_id: The id to pad with.
        pad_to_multiple_of: Round the batch's length up to a multiple of this.
        return_tensors: Only ``"pt"``.
        answers: K, of rankings, or more where a batch has more: then there are KP rows, all first answers and so on,
            with copies of a row's first answer in place of those that it does not have.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    answers: int = 2

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        dialogues = list(map(dialogues_in, examples))
        answers = max(self.answers, *map(len, dialogues))
        rows = [each[k] if k < len(each) else each[0] for k in range(answers) for each in dialogues]
        length = round_up(max(len(ids) for ids in rows), self.pad_to_multiple_of or 1)
        batch = {
            "input_ids": torch.tensor([[*ids, *[self.pad_token_id] * (length - len(ids))] for ids in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in rows]),
        }
        labels = labels_of(examples, answers)
        return add_labels(batch, {name: torch.from_numpy(values_P) for name, values_P in labels.items()})


@dataclass(frozen=True)
class StepEnds:
    """Adds to a padded batch of solutions what `labels_of` says of their steps, and where each ends: `end`, [P, K].

    Args:
        collate: Examples -> a batch whose tokens have `labels`, [P, L].
        steps: K, the most labeled steps of a solution.
    """

    collate: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
    steps: int

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = self.collate(examples)
        labels = {name: torch.from_numpy(values_PK) for name, values_PK in labels_of(examples, self.steps).items()}
        end_PK = torch.zeros(labels["step"].shape, dtype=torch.long)
        end_PK[labels["is_there"]] = (batch["labels"] != NO_LABEL).nonzero()[:, 1]
        return add_labels(batch, labels | {"end": end_PK})


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
        if missing := [key for key in LEGACY_KEYS if any(key not in feature for feature in features)]:
            raise UserError(
                f"The features should include {', '.join(LEGACY_KEYS)}, but {', '.join(missing)} is missing; found "
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
        if "chosen_probability" in features[0]:
            probability_P = torch.tensor([feature["chosen_probability"] for feature in features], dtype=torch.float)
            batch = add_labels(batch, {"chosen_probability": probability_P})
        return batch


def join_halves(batch: Mapping[str, Any], pad_token_id: int, padding_side: str) -> dict[str, Any]:
    """Make a `RewardDataCollatorWithPadding` batch a `DataCollatorForPreference` one: one length, chosen rows first.

    Left-padded halves are lengthened on the left, so every row keeps its own text at the same end.
    """
    length = max(batch[f"input_ids_{half}"].shape[1] for half in ("chosen", "rejected"))

    def join(key: str, fill: int) -> torch.Tensor:
        halves = [batch[f"{key}_{half}"] for half in ("chosen", "rejected")]
        return torch.cat([lengthen(rows, length, fill, padding_side) for rows in halves])

    joined = {"input_ids": join("input_ids", pad_token_id), "attention_mask": join("attention_mask", 0)}
    return joined | {key: batch[key] for key in batch if is_ours(key)}


def lengthen(rows_RL: torch.Tensor, length: int, fill: int, padding_side: str) -> torch.Tensor:
    """Pad the second dimension of ``rows_RL`` with ``fill`` up to ``length``."""
    missing = length - rows_RL.shape[1]
    return pad_tensor(rows_RL, (missing, 0) if padding_side == "left" else (0, missing), value=fill)


def bucket_lengths(longest: int, max_lengths: int = 4, multiple: int = 64) -> tuple[int, ...]:
    """Return a few row lengths that cover every batch: the longest, rounded up to ``multiple``, and successive halves.

    >>> bucket_lengths(1000)
    (128, 256, 512, 1024)
    >>> bucket_lengths(30)
    (64,)
    """
    halves = (round_up(longest, 2**halvings) // 2**halvings for halvings in range(max_lengths))
    return tuple(sorted({round_up(length, multiple) for length in halves}))


@dataclass(frozen=True)
class PadToLengths:
    """Lengthens a collated batch, in either of TRL's layouts, to the shortest of a few planned lengths that fits.

    Both halves of a batch with separate halves get the same length. A batch longer than all keeps its own length, and
    so does one with keys of a user's, which may go with it.

    Args:
        collate: Examples -> TRL's batch.
        lengths: The planned lengths, ascending.
        pad_token_id: Fills token ids.
        padding_side: Where ``collate`` pads.
    """

    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
    lengths: tuple[int, ...]
    pad_token_id: int
    padding_side: str = "right"

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = self.collate(examples)
        names = LEGACY_KEYS if "input_ids" not in batch else ("input_ids", "attention_mask")
        fills = {key: self.pad_token_id if key.startswith("input_ids") else 0 for key in names}
        if f"{OURS}end" in batch:
            fills["labels"] = NO_LABEL
        if any(key not in fills and key != "return_loss" and not is_ours(key) for key in batch):
            return batch
        longest = max(batch[key].shape[1] for key in fills)
        length = next((length for length in self.lengths if length >= longest), longest)
        return batch | {key: lengthen(batch[key], length, fill, self.padding_side) for key, fill in fills.items()}


@dataclass(frozen=True)
class PairRows:
    """Turns a collated batch into pair rows of a fixed number of pairs.

    `input_ids` and `attention_mask` become [P, 2, L], a pair's two dialogues together, so that sharding the first
    dimension never parts them. `pair_mask` [P] is true for real pairs: a short last batch is filled with copies of its
    first pair, so that it is no new shape. `margin` [P] comes along where the data has it. Of processes with a device
    each, every one takes its part of the pairs, so that the parts' mean loss is the mean over all real pairs.

    Args:
        collate: Examples -> a batch in either of TRL's layouts.
        pairs: P, pairs in every batch.
        pad_token_id: Fills token ids.
        padding_side: Where ``collate`` pads.
        part: Which pairs to take: (1, 4) are the second quarter.
    """

    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
    pairs: int
    pad_token_id: int
    padding_side: str = "right"
    part: tuple[int, int] = (0, 1)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.collate(examples)
        if "input_ids" not in batch:
            batch = join_halves(batch, self.pad_token_id, self.padding_side)
        labels = labels_in(batch)
        answers, (rows_of_all, length) = answers_in(labels), batch["input_ids"].shape
        rows = {
            key: self._fill(batch[key].view(answers, -1, length).transpose(0, 1))
            for key in ("input_ids", "attention_mask")
        }
        filled = {name: self._fill(values) for name, values in labels.items()}
        rows = add_labels(rows, filled | {"pair_mask": torch.arange(self.pairs) < rows_of_all // answers})
        index, count = self.part
        if count == 1:
            return rows
        own = {key: values_P.chunk(count)[index] for key, values_P in rows.items()}
        return add_labels(own, {"batch_pairs": torch.tensor([max(1, sum(weights_of(examples))) / count])})

    def _fill(self, values_P: torch.Tensor) -> torch.Tensor:
        missing = self.pairs - values_P.shape[0]
        return torch.cat([values_P, values_P[:1].expand(missing, *values_P.shape[1:])]).contiguous()


@dataclass(frozen=True)
class PlannedRows:
    """Packs a batch's pairs into rows of planned shapes, every shared prefix once: ``{"packed": PackedBatch}``.

    Args:
        plan: From `plan_rows`.
        pairs: P, pairs in every batch.
        pad_token_id: Fills what rows have left.
        answers: K, the most dialogues of an example: 2 of pairs.
        expands: Whether attention reads rows of whole dialogues (see `trl_tpu.packing.expand`).
        part: As in `pack`.
    """

    plan: RowPlan
    pairs: int
    pad_token_id: int
    answers: int = 2
    expands: bool = False
    part: tuple[int, int] = (0, 1)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> PackedInputs:
        dialogues, labels = list(map(dialogues_in, examples)), labels_of(examples, self.answers)
        rows = pack(dialogues, self.plan, self.pairs, self.pad_token_id, labels, self.answers, self.expands, self.part)
        return PackedInputs(packed=PackedBatch(tuple(each.map_tensors(torch.from_numpy) for each in rows)))


@dataclass(frozen=True)
class UnpaddedRow:
    """Packs a batch's pairs into one row without padding, for devices that take any shape: one micro-batch.

    Args:
        pad_token_id: Texts end before it.
        attention_crossover_length: As in `pack_unpadded`.
        answers: As in `PlannedRows`.
    """

    pad_token_id: int
    attention_crossover_length: float
    answers: int = 2

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> PackedInputs:
        dialogues, labels = list(map(dialogues_in, examples)), labels_of(examples, self.answers)
        row = pack_unpadded(dialogues, self.pad_token_id, labels, self.answers, self.attention_crossover_length)
        return PackedInputs(packed=PackedBatch((row.map_tensors(torch.from_numpy),)))
