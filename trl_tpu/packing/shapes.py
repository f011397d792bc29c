"""Shapes of rows, planned from the lengths of a dataset."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import UserError

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


Schedule = tuple[RowShape, ...]
"""The row shapes of one batch's micro-batches, in order; the last one's updates."""

_MAX_ACCUMULATED = 3  # micro-batches that are planned for; rarer batches take more
_LENGTHS_OF_A_PLAN = 7
_CANDIDATE_QUANTILES = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
_GOOD_ENOUGH = 1.05  # times the tokens themselves


@dataclass(frozen=True)
class RowPlan:
    """The row shapes of a run.

    Without `accumulate`, the last of `update` holds any batch. With it, its longest row holds any pair, so that enough
    micro-batches hold any batch.

    Args:
        update: The shapes of micro-batches that end a batch, at least one.
        accumulate: The shapes of those that come before.
        attention_crossover_length: The row length at which attention costs as much as everything else.
        micro_batch_work: What one more micro-batch costs by itself, in tokens.
    """

    update: tuple[RowShape, ...]
    accumulate: tuple[RowShape, ...] = ()
    attention_crossover_length: float = 4096
    micro_batch_work: float = 0

    def __str__(self) -> str:
        shapes = " or ".join(map(str, self.update))
        before = f", after micro-batches of {' or '.join(map(str, self.accumulate))} where a batch needs them"
        return shapes + (before if self.accumulate else "")

    @property
    def shapes(self) -> tuple[RowShape, ...]:
        """All shapes, of which each is one program."""
        return (*self.accumulate, *self.update)

    @property
    def longest(self) -> int:
        """The length of the longest row, which no pair may exceed."""
        return max(shape.length for shape in self.shapes)

    def work(self, schedule: Schedule) -> float:
        """Return what the micro-batches of a schedule cost, in tokens."""
        rows = sum(shape.work(self.attention_crossover_length) for shape in schedule)
        return rows + (len(schedule) - 1) * self.micro_batch_work

    @property
    def accumulations(self) -> list[Schedule]:
        """What may come before the update, up to the number of micro-batches that is planned for."""
        counts = range(_MAX_ACCUMULATED + 1)
        return [each for n in counts for each in itertools.combinations_with_replacement(self.accumulate, n)]

    @cached_property
    def _usual_schedules(self) -> tuple[Schedule, ...]:
        every = ((*before, update) for before in self.accumulations for update in self.update)
        return tuple(sorted(every, key=self.work))

    def schedules(self) -> Iterator[Schedule]:
        """Yield schedules, the cheapest first; without end where gradients can accumulate."""
        yield from self._usual_schedules
        if not self.accumulate:
            return
        longest = max(self.accumulate, key=lambda shape: shape.length)
        for count in itertools.count(_MAX_ACCUMULATED + 1):
            yield (longest,) * count + self.update[-1:]


def plan_rows(
    sizes: np.ndarray,
    pairs: int,
    shards: int = 1,
    *,
    max_shapes: int = 4,
    shared_prefix: int = 0,
    attention_crossover_length: float = 4096,
    micro_batch_work: float = 128,
    multiple: int = 32,
    row_length: int | None = None,
) -> RowPlan:
    """Choose at most ``max_shapes`` shapes for the least expected work on batches drawn from the data's own sizes.

    Args:
        sizes, pairs, shards, max_shapes, shared_prefix, attention_crossover_length, multiple: As in
            `plan_shapes`.
        micro_batch_work: What one more micro-batch costs by itself on each device, in tokens: reading the weights
            again, and reading and writing the gradients.
        row_length: The length of all rows, instead of lengths that fit the data.

    Raises:
        UserError: If ``row_length`` is too short for a pair.
    """
    if row_length is None:
        shapes = plan_shapes(sizes, pairs, shards, max_shapes, shared_prefix, attention_crossover_length, multiple)
    else:
        shapes = (_rows_of(row_length, sizes, pairs, shards, shared_prefix),)
    single = RowPlan(shapes, (), attention_crossover_length, micro_batch_work * shards)
    added = np.maximum(np.asarray(sizes) - shared_prefix, 0)
    if max_shapes < 2 or len(added) < pairs:
        return single
    batches_BP = draw_batches(added, pairs, max_batches=max(48, 2048 // pairs))
    work_B = covering_work([(shape,) for shape in single.update], single, batches_BP, shared_prefix).min(axis=0)
    work_B[np.isinf(work_B)] = single.work(single.update[-1:])  # by `zigzag`, where best fit fails
    needed = batches_BP.sum() + shared_prefix * shards * len(batches_BP)
    if work_B.sum() / (1 + single.longest / attention_crossover_length) < _GOOD_ENOUGH * needed:
        return single
    longest = int(added.max()) + shared_prefix
    lengths = np.array([row_length]) if row_length else _lengths(batches_BP, longest, shared_prefix, multiple)
    several, several_work = _plan_accumulation(batches_BP, lengths, shards, max_shapes, shared_prefix, single)
    return several if several_work < work_B.sum() else single


def _rows_of(length: int, sizes: np.ndarray, pairs: int, shards: int, shared_prefix: int) -> RowShape:
    """Return as many rows of ``length`` as the largest pairs of the data need by `zigzag`: they hold every batch.

    Raises:
        UserError: If a pair is longer.
    """
    if sizes.max() > length:
        raise UserError(
            f"row_length={length} is too short: the largest pair takes {sizes.max()} tokens (both sequences, their "
            f"common prefix once), and pairs are never cut. Choose row_length={round_up(int(sizes.max()), 128)} or "
            "more, or leave out long sequences with a smaller max_length."
        )
    worst_P = np.sort(np.maximum(sizes - shared_prefix, 0))[::-1][:pairs]
    shapes = holding_all(worst_P, shards, shared_prefix, 1)
    return RowShape(next(shape.rows for shape in shapes if shape.length <= length), length)


def _lengths(batches_BP: np.ndarray, longest: int, shared_prefix: int, multiple: int) -> np.ndarray:
    """Return row lengths worth trying, in ascending order; the last holds any pair."""
    shortest = min(max(float(np.median(batches_BP)) + shared_prefix, 1.0), longest)
    return np.unique(round_up(np.geomspace(shortest, max(longest, 1), _LENGTHS_OF_A_PLAN).astype(int), multiple))


def _plan_accumulation(
    batches_BP: np.ndarray, lengths: np.ndarray, shards: int, max_shapes: int, shared_prefix: int, like: RowPlan
) -> tuple[RowPlan, float]:
    """Return the best plan whose batches may accumulate, and its total work on the batches."""
    crossover_length, updates = like.attention_crossover_length, _updates(batches_BP, lengths, shards, shared_prefix)
    plans = []
    *others, any_pair = (RowShape(shards, int(length)) for length in lengths)
    for accumulate in [(any_pair,), *((any_pair, other) for other in others if max_shapes > 2)]:
        plan = replace(like, update=(), accumulate=accumulate)
        before = plan.accumulations
        schedules = [(*each, update) for update in updates for each in before]
        works_CB = covering_work(schedules, plan, batches_BP, shared_prefix)
        works_CB = works_CB.reshape(len(updates), len(before), -1).min(axis=1)
        enough = batches_BP.shape[1] * (any_pair.work(crossover_length) + like.micro_batch_work)
        chosen = least_work(works_CB, enough, max_shapes - len(accumulate))
        work = float(np.minimum(works_CB[chosen].min(axis=0), enough).sum())
        shapes = sorted({updates[index] for index in chosen}, key=lambda shape: shape.work(crossover_length))
        plans.append((replace(plan, update=tuple(shapes)), work))
    return min(plans, key=lambda each: each[1])


def _updates(batches_BP: np.ndarray, lengths: np.ndarray, shards: int, shared_prefix: int) -> list[RowShape]:
    """Return shapes to update with that are worth trying: for each length, the rows that some of the batches need."""
    updates = set()
    for length in lengths.tolist():
        rows_B = rows_needed(np.minimum(batches_BP, length - shared_prefix), length - shared_prefix)
        for rows in np.quantile(rows_B, _CANDIDATE_QUANTILES):
            updates.add(RowShape(int(round_up(int(rows), shards)) or shards, length))
    return sorted(updates, key=lambda shape: (shape.rows * shape.length, shape.length))


def covering_work(schedules: list[Schedule], plan: RowPlan, batches_BP: np.ndarray, shared_prefix: int) -> np.ndarray:
    """Return the work of each schedule for each batch [C, B]; infinite where the batch does not fit.

    Args:
        batches_BP: Sizes without the first ``shared_prefix`` tokens, in descending order.
    """
    totals_B = batches_BP.sum(axis=1)
    works_CB = np.full((len(schedules), len(batches_BP)), np.inf)
    for index, schedule in enumerate(schedules):
        lengths = np.array([shape.length - shared_prefix for shape in schedule for _ in range(shape.rows)])
        may_fit = np.flatnonzero((totals_B <= lengths.sum()) & (batches_BP[:, 0] <= lengths.max()))
        if len(may_fit):
            fits, _ = best_fit(batches_BP[may_fit], lengths)
            works_CB[index, may_fit[fits]] = plan.work(schedule)
    return works_CB
