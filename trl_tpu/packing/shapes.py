"""Which few row shapes a run uses, chosen from the sizes of its pairs before it starts. numpy only.

XLA compiles one program for each shape, so there may be few; every column of a row costs the same whether a token is
in it or not, so they should fit the batches that will come. Batches are drawn at random from the data's own sizes,
and the shapes with the least expected work are taken. The last shape holds any batch: it is the only one that must.

Letters: B batches, P pairs, R rows, L length of a row, C candidate shapes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

_CANDIDATE_LENGTHS = 64
_SWEEPS = 8


@dataclass(frozen=True)
class RowShape:
    """R rows of L columns."""

    rows: int
    length: int

    def work(self, attention_length: float) -> float:
        """What computing all columns costs, in tokens: the linear layers, and attention, quadratic in a row.

        Args:
            attention_length: The row length at which attention costs as much as everything else.
        """
        return self.rows * self.length * (1 + self.length / attention_length)

    def __str__(self) -> str:
        return f"{self.rows} x {self.length}"


def plan_shapes(
    sizes: np.ndarray,
    pairs: int,
    shards: int = 1,
    *,
    most: int = 4,
    common: int = 0,
    attention_length: float = 4096,
    multiple: int = 32,
    seed: int = 0,
) -> tuple[RowShape, ...]:
    """At most ``most`` shapes, in ascending order of their work, one of which every batch fits.

    Args:
        sizes: The size of each pair of the data, [N]: its tokens with the common prefix once (see `pair_size`). For a
            stream: of a sample, and of the longest pair that may come, ``pairs`` times.
        pairs: P, pairs in a batch.
        shards: Over how many devices the rows are split: the number of rows is a multiple of it.
        most: How many shapes at most.
        common: How many first tokens all dialogues of the data share, such as a system prompt.
        attention_length: The row length at which attention costs as much as everything else. For a plain transformer
            it is about six times the hidden size.
        multiple: Lengths are multiples of this.
        seed: Of the batches that are drawn.

    Raises:
        ValueError: If a number is not positive, or there are no sizes.
    """
    if not len(sizes) or min(pairs, shards, most, multiple) < 1 or attention_length <= 0:
        raise ValueError(
            "Planning shapes needs sizes, and positive numbers of pairs, shards, shapes and columns; got "
            f"{len(sizes)} sizes, pairs={pairs}, shards={shards}, most={most}, multiple={multiple}, "
            f"attention_length={attention_length}."
        )
    # what a pair adds to a row that begins with the common tokens; pairs of size 0 fill up data of less than a batch
    added = np.concatenate([np.maximum(np.asarray(sizes) - common, 0), np.zeros(max(0, pairs - len(sizes)), int)])
    worst_P = np.sort(added)[::-1][:pairs]
    largest = largest_shape(worst_P, shards, common, attention_length, multiple)
    batches_BP = draw_batches(added, pairs, seed)
    candidates, fits_CB = _candidates(batches_BP, worst_P, shards, common, multiple)
    works_C = np.array([shape.work(attention_length) for shape in candidates])
    works_CB = np.where(fits_CB, works_C[:, None], np.inf)
    chosen = least_work(works_CB, largest.work(attention_length), most - 1)
    shapes = {candidates[index] for index in chosen if works_C[index] < largest.work(attention_length)} | {largest}
    return tuple(sorted(shapes, key=lambda shape: shape.work(attention_length)))


def snake(pairs: int, rows: int) -> np.ndarray:
    """Deal pairs out to rows, back and forth: the row of the i-th largest pair, [P].

    If every pair of a batch is at most as large as the pair of the same rank in another batch, so is every row. So
    rows that are long enough for the largest pairs of the data are long enough for any batch.
    """
    deal, place = np.divmod(np.arange(pairs), rows)
    return np.where(deal % 2 == 0, place, rows - 1 - place)


def round_up(values: Any, multiple: int) -> Any:
    """To the next multiple."""
    return -(-values // multiple) * multiple


def largest_shape(worst_P: np.ndarray, shards: int, common: int, attention_length: float, multiple: int) -> RowShape:
    """The cheapest shape that holds the largest pairs of the data, dealt out: then it holds every batch."""
    shapes = []
    for rows in range(shards, len(worst_P) + shards, shards):
        longest = int(np.bincount(snake(len(worst_P), rows), worst_P).max()) + common
        shapes.append(RowShape(rows, round_up(max(longest, 1), multiple)))
    return min(shapes, key=lambda shape: shape.work(attention_length))


def draw_batches(sizes: np.ndarray, pairs: int, seed: int, most: int = 512) -> np.ndarray:
    """Batches of sizes [B, P] as training would draw them: consecutive parts of random orders."""
    count = min(most, max(64, 2**15 // pairs))
    generator = np.random.default_rng(seed)
    whole = len(sizes) // pairs
    epochs = [generator.permutation(sizes)[: whole * pairs].reshape(whole, pairs) for _ in range(-(-count // whole))]
    return np.concatenate(epochs)[:count]


def _candidates(
    batches_BP: np.ndarray, worst_P: np.ndarray, shards: int, common: int, multiple: int
) -> tuple[list[RowShape], np.ndarray]:
    """Shapes worth trying, and which of the batches fit each, [C, B]."""
    longest = max(worst_P[0], batches_BP.sum(axis=1).max() / shards, 1)
    shortest = np.clip(np.median(batches_BP), 1, longest)
    lengths = np.geomspace(shortest, longest, _CANDIDATE_LENGTHS) + common
    candidates, fits = [], []
    for length in np.unique(round_up(np.ceil(lengths).astype(int), multiple)):
        rows_B = round_up(rows_needed(batches_BP, int(length) - common), shards)
        for rows in np.unique(rows_B[rows_B > 0]):
            candidates.append(RowShape(int(rows), int(length)))
            fits.append((rows_B > 0) & (rows_B <= rows))
    return candidates, np.array(fits)


def rows_needed(batches_BP: np.ndarray, length: int) -> np.ndarray:
    """How many rows best fit, the largest pair first, needs for each batch [B]; 0 where a pair is too long."""
    sizes_BP = -np.sort(-batches_BP, axis=1)
    each = np.arange(len(sizes_BP))
    # any two rows together are more than full, or one pair would have gone to the other row
    rows = min(sizes_BP.shape[1], int(2 * sizes_BP.sum(axis=1).max() // max(length, 1)) + 2)
    free_BR = np.full((len(sizes_BP), rows), length)
    for size_B in sizes_BP.T:
        fits_BR = free_BR >= size_B[:, None]
        row_B = np.where(fits_BR, free_BR, np.iinfo(np.int64).max).argmin(axis=1)
        free_BR[each, row_B] -= size_B
    return np.where(sizes_BP[:, 0] <= length, np.maximum((free_BR < length).sum(axis=1), 1), 0)


def least_work(works_CB: np.ndarray, largest_work: float, count: int) -> list[int]:
    """Up to ``count`` candidates that have, with the largest shape, the least total work: greedy, then swaps."""
    chosen: list[int] = []

    def add_best() -> None:
        best_B = np.minimum(works_CB[chosen].min(axis=0, initial=largest_work), largest_work)
        chosen.append(int(np.minimum(works_CB, best_B).sum(axis=1).argmin()))

    for _ in range(count):
        add_best()
    for _ in range(_SWEEPS):
        before = set(chosen)
        for _ in range(count):
            chosen.pop(0)
            add_best()
        if set(chosen) == before:
            break
    return chosen
