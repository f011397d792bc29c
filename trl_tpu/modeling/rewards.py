"""Reads a batch in any layout, and computes the rewards of its pairs in one forward over all dialogues."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..data.collators import join_halves
from ..data.judgements import answers_in, answers_there, is_ours, labels_in
from ..data.packed_batch import is_micro_batch
from ..packing.rows import PackedRows
from .attention.masked import packed_rewards


@dataclass(frozen=True)
class PairBatch:
    """The dialogues of P pairs, or of P prompts of K answers, as rows, and how to find a pair's rows.

    `interleaved` rows are c0 r0 c1 r1 ... (pair rows, [P, K, L]); otherwise c0 c1 ... r0 r1 ... (TRL's layout).
    """

    input_ids_RL: torch.Tensor
    attention_mask_RL: torch.Tensor
    labels: dict[str, torch.Tensor]
    mask_P: torch.Tensor
    answers: int
    interleaved: bool
    batch_pairs_1: torch.Tensor | None = None
    """What the loss is a mean over, where it is not the real pairs: a process's share of those of a batch of all."""

    @classmethod
    def read(cls, inputs: Mapping[str, Any], pad_token_id: int, padding_side: str) -> "PairBatch":
        """Read any of the three layouts: pair rows, `DataCollatorForPreference`, `RewardDataCollatorWithPadding`."""
        if "input_ids" not in inputs:
            inputs = join_halves(inputs, pad_token_id, padding_side)
        input_ids, attention_mask = inputs["input_ids"], inputs["attention_mask"]
        interleaved = input_ids.dim() == 3
        if interleaved:
            input_ids, attention_mask = input_ids.flatten(0, 1), attention_mask.flatten(0, 1)
        labels = labels_in(inputs)
        answers = answers_in(labels)
        all_P = torch.ones(len(input_ids) // answers, dtype=torch.bool, device=input_ids.device)
        mask_P, pairs_1 = labels.pop("pair_mask", all_P), labels.pop("batch_pairs", None)
        return cls(input_ids, attention_mask, labels, mask_P, answers, interleaved, pairs_1)

    def rewards(self, model: nn.Module, **extras: Any) -> tuple[torch.Tensor, Any]:
        """Compute the rewards [P, K] by the model's pooling; also return its outputs."""
        outputs = model(input_ids=self.input_ids_RL, attention_mask=self.attention_mask_RL, **extras)
        return self.by_pair(outputs.logits), outputs

    def by_pair(self, logits_RA: torch.Tensor) -> torch.Tensor:
        """Return the model's logits as float32 rewards, [P, K]: chosen, rejected; or of the tokens that end steps.

        Of several attributes they are [P, A, K].
        """
        if "end" in self.labels:
            return rewards_from(logits_RA.float(), self.labels).gather(1, self.labels["end"])
        if logits_RA.dim() == 3:  # of each token, and what is asked for are the last ones
            last_R = self.attention_mask_RL.sum(-1) - 1
            logits_RA = logits_RA[torch.arange(len(last_R), device=last_R.device), last_R]
        return rewards_from(self._by_pair(logits_RA.squeeze(-1).float()), self.labels)

    def _by_pair(self, values_R: torch.Tensor) -> torch.Tensor:
        if self.interleaved:
            return values_R.unflatten(0, (-1, self.answers))
        return values_R.unflatten(0, (self.answers, -1)).transpose(0, 1)

    def mean(self, losses_P: torch.Tensor) -> torch.Tensor:
        """Return the batch's loss: the mean over the pairs that are no padding; 0 where all are."""
        weights_P = self.mask_P * self.labels.get("weight", 1)
        pairs = weights_P.sum().clamp(min=1) if self.batch_pairs_1 is None else self.batch_pairs_1.squeeze()
        return torch.where(self.mask_P, losses_P, 0.0).sum() / pairs

    @property
    def tokens(self) -> torch.Tensor:
        """How many tokens the real pairs have, not counting padding: an int32 scalar."""
        tokens_PK = self._by_pair(self.attention_mask_RL.sum(-1, dtype=torch.int32))
        mask_PK = self.mask_P[:, None] & (answers_there(self.labels["is_there"]) if "grade" in self.labels else True)
        return (tokens_PK * mask_PK).sum(dtype=torch.int32)


@dataclass(frozen=True)
class PackedPairs:
    """The pairs of a batch that are in one micro-batch of packed rows."""

    rows: PackedRows[torch.Tensor]
    labels: dict[str, torch.Tensor]
    mask_P: torch.Tensor

    def rewards(self, model: nn.Module, **extras: Any) -> tuple[torch.Tensor, Any]:
        """Compute the rewards [P, K]; the model's own outputs, one a row, mean nothing."""
        return rewards_from(packed_rewards(model, self.rows, **extras), self.labels), None

    def mean(self, losses_P: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's part of the batch's mean loss: the parts add up to it."""
        return torch.where(self.mask_P, losses_P, 0.0).sum() / self.rows.batch_pairs_1.squeeze()

    @property
    def tokens(self) -> torch.Tensor:
        """How many tokens the dialogues of these pairs have, as if nothing were shared: an int32 scalar."""
        return self.rows.tokens_P.sum(dtype=torch.int32)


def rewards_from(outputs: torch.Tensor, labels: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a head's outputs as rewards [P, K]; of several attributes [P, A, K].

    Of steps, [..., 2], they are the log-odds that each is right.
    """
    rewards = outputs[..., 1] - outputs[..., 0] if "step" in labels else outputs
    return rewards.transpose(1, 2) if rewards.dim() == 3 else rewards


def other_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a micro-batch that `read_batch` does not read: they go to the model, as in TRL.

    Of TRL's old layout, with separate halves, nothing else went there.
    """
    read = {"rows"} if is_micro_batch(inputs) else {"input_ids", "attention_mask"}
    is_old = not read & set(inputs)
    return {key: value for key, value in inputs.items() if not (is_old or key in read or is_ours(key))}


def read_batch(inputs: Mapping[str, Any], pad_token_id: int, padding_side: str) -> PairBatch | PackedPairs:
    """Read the pairs of a micro-batch in any layout.

    Args:
        inputs: Packed rows, pair rows, or a batch of `DataCollatorForPreference` or `RewardDataCollatorWithPadding`.
        pad_token_id: What padded rows are padded with.
        padding_side: On which side they are.
    """
    if is_micro_batch(inputs):
        rows: PackedRows[torch.Tensor] = inputs["rows"]
        return PackedPairs(rows, rows.labels, rows.pair_mask_P)
    return PairBatch.read(inputs, pad_token_id, padding_side)


def rewards_of(outputs: Any, inputs: Mapping[str, Any], pad_token_id: int, padding_side: str) -> torch.Tensor | None:
    """Read rewards [P, 2] from what a loss returns beside itself; None where there are none to be read.

    They are ``rewards``, [P, K] or of several attributes [P, A, K], or the ``logits`` of a micro-batch's pairs; else
    two tensors of a reward a pair, chosen first, whatever their names.
    """
    if isinstance(outputs, Mapping) and getattr(outputs.get("rewards"), "ndim", 0) in (2, 3):
        return outputs["rewards"]
    if isinstance(outputs, Mapping) and "logits" in outputs:
        is_read = "input_ids" in inputs or "input_ids_chosen" in inputs  # not a batch of the user's own making
        batch = read_batch(inputs, pad_token_id, padding_side) if is_read else None
        return batch.by_pair(outputs["logits"]) if isinstance(batch, PairBatch) else None
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    halves = [each.flatten() for each in values if isinstance(each, torch.Tensor)]
    if len(halves) != 2 or len(halves[0]) != len(halves[1]):
        return None
    return torch.stack(halves, dim=-1)
