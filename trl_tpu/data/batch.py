"""One batch: rows of tokens, the positions where rewards are read, and a table of comparisons.

A collator makes all micro-batches of a batch at once. A user's code that reads batches is given TRL's dict instead:
`input_ids` and `attention_mask` [K P, L], all first answers before all second ones, and `margin` [P].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..errors import UserError
from ..packing.pack import Arrays, Sequences, TokenRows, last_scored
from .comparisons import ComparisonRule, Comparisons
from .measure import read_row


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
            found[0 if part.table.kind == "steps" else place % answers, place // answers] = ids_L
    return [found[key] for key in sorted(found)]


def parts_of(inputs: Any) -> tuple[Batch, ...]:
    """Return the micro-batches of our collators' batch, whatever became of its class; none of a batch of another's."""
    parts: Any = inputs.get(_PARTS) if isinstance(inputs, Mapping) else None
    is_ours = isinstance(parts, tuple | list) and all(isinstance(part, Batch) for part in parts)
    return tuple(parts) if is_ours else ()


def apart(inputs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the parts of a batch that are computed one at a time: each micro-batch, or a user's batch as it is."""
    parts = parts_of(inputs)
    yield from (CollatedBatch.of(part, pad_token_id=inputs[_FILL]) for part in parts) if parts else (inputs,)


def tensors_in(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tensors of a part from `apart` by name."""
    parts = parts_of(inputs)
    return parts[0].tensors() if parts else inputs


# ---- making batches


Example = Mapping[str, Any]

LayOut = Callable[[Sequences], list[TokenRows[np.ndarray]]]


def sequences_of(rows: Sequence[Example], pad_token_id: int, most: int | None = None, answers: int = 2) -> Sequences:
    """Return the sequences of rows of `read_row`, and where their rewards are read.

    Args:
        pad_token_id: A sequence is scored at its last other token.
        most: P; by default as many as there are.
        answers: K.

    Raises:
        UserError: There are more rows than P.
    """
    if most is not None and len(rows) > most:  # numpy would leave the last ones out
        raise UserError(f"A batch has at most {most} rows, as its shapes were planned; got {len(rows)}.")
    ids, at, pair_D = list[np.ndarray](), list[np.ndarray](), list[int]()
    for pair, row in enumerate(rows):
        own = [np.asarray(each, np.int32) for each in row["answers"]]
        ids, pair_D = ids + own, pair_D + [pair] * len(own)
        if "step_ends" in row:
            at.append(np.asarray(row["step_ends"], np.int64))
        else:
            at += [np.array([last_scored(each, pad_token_id)]) for each in own]
    return Sequences(ids, at, np.array(pair_D), pad_token_id, most or len(rows), answers)


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
        """Return this process's examples, in the order of the batch; there may be none.

        Raises:
            UserError: There are more than all processes together compute.
        """
        most = self.pairs * self.count
        if len(examples) > most:
            raise UserError(f"A batch has at most {most} rows, as its shapes were planned; got {len(examples)}.")
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
        own = part.of(every)
        laid_out = self.lay_out(sequences_of(own or rows[:1], self.pad_token_id, part.pairs, self.rule.answers))
        if not own:  # a process with nothing to do computes a row of which nothing counts
            laid_out = [replace(tokens, tokens_S=0 * tokens.tokens_S) for tokens in laid_out]
        table = part.table(own or rows[:1], every or rows[:1], self.rule)
        parts = (micro_batch(tokens, table) for tokens in laid_out)
        return CollatedBatch.of(*parts, pad_token_id=self.pad_token_id)
