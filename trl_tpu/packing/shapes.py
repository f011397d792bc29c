"""Which few row shapes a run uses, chosen from the sizes of its pairs before it starts. numpy only.

XLA compiles one program for each shape, so there may be few; every column of a row costs the same whether a token is
in it or not, so they should fit the batches that will come. Batches are drawn at random from the data's own sizes,
and the shapes with the least expected work are taken. The last shape holds any batch: it is the only one that must.

Letters: B batches, P pairs, R rows, L length of a row, C candidate shapes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_CANDIDATE_LENGTHS = 64


@dataclass(frozen=True)
class RowShape:
    """R rows of L columns."""

    rows: int
    length: int

    def work(self, attention_crossover_length: float) -> float:
        """Return what computing all columns costs, in tokens: the linear layers, and attention, quadratic in a row.

        Args:
            attention_crossover_length: The row length at which attention costs as much as everything else.
        """
        return self.rows * self.length * (1 + self.length / attention_crossover_length)

    def __str__(self) -> str:
        return f"{self.rows} x {self.length}"


def attention_crossover_length(hidden_size: int) -> float:
    """Return the row length at which attention takes as many operations as the linear layers of a plain transformer.

    Of a layer's multiplications a token takes 12 H^2 in its linear layers and 2 H L in attention over L others.
    """
    return 6 * hidden_size


def plan_shapes(
    sizes: np.ndarray,
    pairs: int,
    shards: int = 1,
    max_shapes: int = 4,
    shared_prefix: int = 0,
    attention_crossover_length: float = 4096,
    multiple: int = 32,
) -> tuple[RowShape, ...]:
    """Choose at most ``max_shapes`` shapes, in ascending order of their work, one of which every batch fits.

    Args:
        sizes: The size of each pair of the data, [N]: its tokens with the common prefix once (see
            `trl_tpu.data.measure.Measured.sizes_N`). For a stream: of a sample, and of the longest pair that may come,
            ``pairs`` times.
        pairs: P, pairs in a batch.
        shards: Over how many devices the rows are split: the number of rows is a multiple of it.
        max_shapes: How many shapes at most.
        shared_prefix: How many first tokens all sequences of the data share, such as a system prompt.
        attention_crossover_length: The row length at which attention costs as much as everything else. For a plain
            transformer it is about six times the hidden size.
        multiple: Lengths are multiples of this.
    """

    def work(shape: RowShape) -> float:
        return shape.work(attention_crossover_length)

    # what a pair adds to a row that begins with the shared prefix; pairs of size 0 fill up data of less than a batch
    added = np.maximum(np.asarray(sizes) - shared_prefix, 0)
    added = np.concatenate([added, np.zeros(max(0, pairs - len(sizes)), int)])
    worst_P = np.sort(added)[::-1][:pairs]
    largest = min(holding_all(worst_P, shards, shared_prefix, multiple), key=work)
    batches_BP = draw_batches(added, pairs)
    candidates, fits_CB = _candidates(batches_BP, worst_P, shards, shared_prefix, multiple)
    works_C = np.array([work(shape) for shape in candidates])
    works_CB = np.where(fits_CB, works_C[:, None], np.inf)
    chosen = least_work(works_CB, work(largest), max_shapes - 1)
    return tuple(sorted({candidates[at] for at in chosen if works_C[at] < work(largest)} | {largest}, key=work))


def zigzag(pairs: int, rows: int) -> np.ndarray:
    """Assign pairs to rows back and forth (boustrophedon): return the row of the i-th largest pair, [P].

    If every pair of a batch is at most as large as the pair of the same rank in another batch, so is every row. So
    rows that are long enough for the largest pairs of the data are long enough for any batch.
    """
    deal, place = np.divmod(np.arange(pairs), rows)
    return np.where(deal % 2 == 0, place, rows - 1 - place)


def round_up(values: Any, multiple: int) -> Any:
    """Return the next multiple."""
    return -(-values // multiple) * multiple


def holding_all(worst_P: np.ndarray, shards: int, shared_prefix: int, multiple: int) -> Iterator[RowShape]:
    """Yield shapes that hold the largest pairs of the data, assigned by `zigzag`: then they hold every batch."""
    for rows in range(shards, len(worst_P) + shards, shards):
        longest = int(np.bincount(zigzag(len(worst_P), rows), worst_P).max()) + shared_prefix
        yield RowShape(rows, round_up(max(longest, 1), multiple))


def draw_batches(sizes: np.ndarray, pairs: int, max_batches: int = 512) -> np.ndarray:
    """Draw batches of sizes [B, P] as training would, consecutive parts of random orders; each in descending order."""
    count = min(max_batches, max(64, 2**15 // pairs))
    generator = np.random.default_rng(0)
    whole = len(sizes) // pairs
    epochs = [generator.permutation(sizes)[: whole * pairs].reshape(whole, pairs) for _ in range(-(-count // whole))]
    return -np.sort(-np.concatenate(epochs)[:count], axis=1)


def _candidates(
    batches_BP: np.ndarray, worst_P: np.ndarray, shards: int, shared_prefix: int, multiple: int
) -> tuple[list[RowShape], np.ndarray]:
    """Return shapes worth trying, and which of the batches fit each, [C, B]."""
    longest = max(worst_P[0], batches_BP.sum(axis=1).max() / shards, 1)
    shortest = np.clip(np.median(batches_BP), 1, longest)
    lengths = np.geomspace(shortest, longest, _CANDIDATE_LENGTHS) + shared_prefix
    candidates, fits = [], []
    for length in np.unique(round_up(np.ceil(lengths).astype(int), multiple)):
        rows_B = round_up(rows_needed(batches_BP, int(length) - shared_prefix), shards)
        for rows in np.unique(rows_B[rows_B > 0]):
            candidates.append(RowShape(int(rows), int(length)))
            fits.append((rows_B > 0) & (rows_B <= rows))
    return candidates, np.array(fits)


def rows_needed(batches_BP: np.ndarray, length: int) -> np.ndarray:
    """Return how many rows best fit needs for each batch, in descending order, [B]; 0 where a pair is too long."""
    # any two rows together are more than full, or one pair would have gone to the other row
    rows = min(batches_BP.shape[1], int(2 * batches_BP.sum(axis=1).max() // max(length, 1)) + 2)
    fits_B, free_BR = best_fit(batches_BP, np.full(rows, length))
    return np.where(fits_B, np.maximum((free_BR < length).sum(axis=1), 1), 0)


def best_fit(sizes_BP: np.ndarray, lengths_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place each batch's pairs, in descending order, into the fullest row that has room for them.

    Returns:
        Whether all pairs of a batch found room, [B], and what its rows have left, [B, R].
    """
    free_BR = np.tile(lengths_R, (len(sizes_BP), 1))
    fits_B = np.ones(len(sizes_BP), bool)
    each = np.arange(len(sizes_BP))
    for size_B in sizes_BP.T:
        left_BR = free_BR - size_B[:, None]
        row_B = np.where(left_BR >= 0, left_BR, np.iinfo(np.int64).max).argmin(axis=1)
        placed_B = left_BR[each, row_B] >= 0
        fits_B &= placed_B
        free_BR[each, row_B] -= np.where(placed_B, size_B, 0)
    return fits_B, free_BR


def least_work(works_CB: np.ndarray, largest_work: float, count: int) -> list[int]:
    """Choose up to ``count`` candidates, one by one, that with the largest shape have the least total work."""
    chosen: list[int] = []
    best_B = np.full(works_CB.shape[1], largest_work)
    for _ in range(count):
        chosen.append(int(np.minimum(works_CB, best_B).sum(axis=1).argmin()))
        best_B = np.minimum(best_B, works_CB[chosen[-1]])
    return chosen
