"""Makes batches of prepared rows: a collator makes all micro-batches of a batch at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from ..packing.batch import Batch, Comparisons
from ..packing.pack import Sequences, last_scored
from .comparisons import ComparisonRule
from .measure import STEP_ENDS, answers_of, labels_of

Example = Mapping[str, Any]

LayOut = Callable[[Sequences], list[Batch[np.ndarray]]]


def sequences_of(
    rows: Sequence[Example], pad_token_id: int, table: Comparisons[np.ndarray] | None = None
) -> Sequences:
    """Return the sequences of prepared rows, and where their rewards are read.

    Args:
        pad_token_id: A sequence is scored at its last other token.
        table: Compares their rewards, and may be for more rows; by default they are compared by the default rule.
    """
    table = table or ComparisonRule().table(rows)
    ids, at, pair_D = list[np.ndarray](), list[np.ndarray](), list[int]()
    for pair, row in enumerate(rows):
        own, ends = [np.asarray(each, np.int32) for each in answers_of(row)], labels_of(row).get(STEP_ENDS)
        ids, pair_D = ids + own, pair_D + [pair] * len(own)
        at += [np.array([last_scored(each, pad_token_id)]) for each in own] if ends is None else [np.array(ends, int)]
    return Sequences(ids, at, np.array(pair_D), pad_token_id, table)


@dataclass(frozen=True)
class Part:
    """The examples of a batch that one of several processes computes.

    Args:
        pairs: P of each process: with fewer examples its table is padded.
        index: Of this process; None where all have the same examples, and each has its own rows of their tokens.
        count: Of processes that share the batch.
    """

    pairs: int
    index: int | None = 0
    count: int = 1

    def of(self, examples: Sequence[Any]) -> list[Any]:
        """Return this process's examples, in the order of the batch; there may be none.

        Raises:
            UserError: There are more than all processes together compute.
        """
        most = self.pairs if self.index is None else self.pairs * self.count
        if len(examples) > most:
            raise UserError(f"A batch has at most {most} rows, as its shapes were planned; got {len(examples)}.")
        return list(examples[(self.index or 0) * self.pairs :][: self.pairs])

    def table(self, every: Sequence[Example], example: Example, rule: ComparisonRule) -> Comparisons[np.ndarray]:
        """Compare the rewards of this process's rows, which get their share of the weights of all rows.

        Args:
            every: Rows of all processes; there may be none.
            example: Stands for the rows of a process that has none, and does not count.
            rule: Compares rewards.
        """
        own = self.of(every)
        table = rule.table(own or [example], self.pairs)
        total = table if len(own) == len(every) else rule.table(every)
        table = table if own else table.among(np.zeros(self.pairs, bool))
        return replace(table, weight_sum_1=total.weight_sum_1 / np.float32(self.count))


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

    def __call__(self, examples: Sequence[Example], real: int | None = None) -> Batch[torch.Tensor]:
        """Make the batch; of examples after the first ``real`` ones nothing is computed."""
        part, every = self.part or Part(len(examples)), examples[:real]
        own, table = part.of(every), part.table(every, examples[0], self.rule)
        parts = self.lay_out(sequences_of(own or examples[:1], self.pad_token_id, table))
        if not own:  # a process with nothing to do computes a row of which nothing counts
            parts = [replace(each, tokens_S=0 * each.tokens_S) for each in parts]
        return Batch.of(parts).map_tensors(torch.from_numpy)
