"""Lengths of a dataset's pairs, and planning of row shapes from these lengths."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import UserError

CHUNK = 64
"""Granularity of shared prefixes, in tokens, in planned rows of models with recurrent layers."""


@dataclass(frozen=True)
class PairLengths:
    """Lengths of each pair's common prefix and of the tails after it, in tokens. Rankings have K tails, pairs two."""

    prefix_P: np.ndarray
    tails_PK: np.ndarray
    """Lengths of the tails; 0 for missing answers."""

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int, int]]) -> "PairLengths":
        """Make lengths from one triple per pair: tokens of the prefix, the chosen tail and the rejected tail."""
        lengths_P3 = np.array(list(pairs), dtype=np.int64).reshape(-1, 3)
        return cls(lengths_P3[:, 0], lengths_P3[:, 1:])

    @classmethod
    def joined(cls, parts: Sequence["PairLengths"]) -> "PairLengths":
        """Concatenate the pairs of all parts."""
        most = max((part.tails_PK.shape[1] for part in parts), default=2)
        parts = [cls.of([]), *parts]
        tails = [np.pad(part.tails_PK, ((0, 0), (0, most - part.tails_PK.shape[1]))) for part in parts]
        return cls(np.concatenate([part.prefix_P for part in parts]), np.concatenate(tails))

    @classmethod
    def of_size(cls, size: int) -> "PairLengths":
        """Return a pair of ``size`` unique tokens: half of them in the prompt, a quarter in each answer."""
        answer = max(1, size // 4)
        return cls.of([(size - 2 * answer, answer, answer)])

    def __len__(self) -> int:
        return len(self.prefix_P)

    @property
    def sizes_P(self) -> np.ndarray:
        """Number of unique tokens of each pair: the prefix counts once."""
        return self.prefix_P + self.tails_PK.sum(axis=1)

    def in_chunks(self, chunk: int) -> "PairLengths":
        """Return the lengths with sequences padded to whole chunks and prefixes shared in whole chunks."""
        prefix_P = self.prefix_P // chunk * chunk
        tails_PK = self.tails_PK + (self.prefix_P - prefix_P)[:, None]
        return PairLengths(prefix_P, -(-tails_PK // chunk) * chunk)

    @property
    def longest_P(self) -> np.ndarray:
        """Length of the longest sequence of each pair, in tokens."""
        return self.prefix_P + self.tails_PK.max(axis=1, initial=0)

    @property
    def tokens(self) -> int:
        """Number of unique tokens of all pairs."""
        return int(self.sizes_P.sum())

    def attended(self, window: int | None = None) -> int:
        """Count the (query, key) pairs of causal attention over all unique tokens.

        Args:
            window: Maximum number of keys per query, the query's own token included; None for no limit.
        """

        def attended(length_P: np.ndarray) -> np.ndarray:
            short_P = length_P if window is None else np.minimum(length_P, window)
            return short_P * (short_P + 1) // 2 + (length_P - short_P) * (window or 0)

        shared_P = attended(self.prefix_P)
        return int((shared_P + sum(attended(self.prefix_P + tail_P) - shared_P for tail_P in self.tails_PK.T)).sum())


# ---- shapes and plans


@dataclass(frozen=True)
class RowShape:
    """R rows of L columns."""

    rows: int
    length: int

    def work(self, attention_crossover_length: float) -> float:
        """Return the cost of linear layers and attention, in tokens. Attention is quadratic in the row length.

        Args:
            attention_crossover_length: The row length at which attention costs as much as everything else.
        """
        return self.rows * self.length * (1 + self.length / attention_crossover_length)

    def __str__(self) -> str:
        return f"{self.rows} x {self.length}"


Schedule = tuple[RowShape, ...]
"""The row shapes of one batch's micro-batches, in order. The last micro-batch ends with an update."""

_MAX_ACCUMULATED = 3  # accumulating micro-batches per batch that plans count on; rare batches need more


@dataclass(frozen=True)
class RowPlan:
    """The row shapes of a run.

    Without `accumulate`, any batch fits into the last shape of `update`. With `accumulate`, any pair fits into its
    longest row, so any batch fits into enough micro-batches.

    Args:
        update: Shapes of micro-batches that end a batch, at least one.
        accumulate: Shapes of the micro-batches before them.
        attention_crossover_length: The row length at which attention costs as much as everything else.
        micro_batch_work: Fixed cost of an additional micro-batch, in tokens.
        chunk: Lengths of sequences and of shared prefixes are multiples of this many tokens.
    """

    update: tuple[RowShape, ...]
    accumulate: tuple[RowShape, ...] = ()
    attention_crossover_length: float = 4096
    micro_batch_work: float = 0
    chunk: int = 1

    def __str__(self) -> str:
        shapes = " or ".join(map(str, self.update))
        before = f", after micro-batches of {' or '.join(map(str, self.accumulate))} where a batch needs them"
        return shapes + (before if self.accumulate else "")

    @property
    def shapes(self) -> tuple[RowShape, ...]:
        """All shapes. Each shape is compiled as one program."""
        return (*self.accumulate, *self.update)

    @property
    def longest(self) -> int:
        """The length of the longest row, an upper bound for the size of a pair."""
        return max(shape.length for shape in self.shapes)

    def work(self, *schedule: RowShape) -> float:
        """Return the cost of all micro-batches of a schedule, in tokens."""
        rows = sum(shape.work(self.attention_crossover_length) for shape in schedule)
        return rows + (len(schedule) - 1) * self.micro_batch_work

    @property
    def accumulations(self) -> list[Schedule]:
        """Sequences of shapes before an update, up to the number of micro-batches that plans count on."""
        counts = range(_MAX_ACCUMULATED + 1)
        return [shapes for n in counts for shapes in itertools.combinations_with_replacement(self.accumulate, n)]

    @cached_property
    def _usual_schedules(self) -> list[Schedule]:
        every = ((*before, update) for before in self.accumulations for update in self.update)
        return sorted(every, key=lambda schedule: self.work(*schedule))

    def schedules(self) -> Iterator[Schedule]:
        """Yield schedules, cheapest first. With `accumulate`, there are infinitely many."""
        yield from self._usual_schedules
        if not self.accumulate:
            return
        longest = max(self.accumulate, key=lambda shape: shape.length)
        for count in itertools.count(_MAX_ACCUMULATED + 1):
            yield (longest,) * count + self.update[-1:]


def attention_crossover_length(hidden_size: int) -> float:
    """Return the row length at which attention takes as many operations as the linear layers of a plain transformer.

    Per token, a layer takes 12 H^2 multiplications in linear layers, and 2 H L in attention over L tokens.
    """
    return 6 * hidden_size


def round_up(values: Any, multiple: int) -> Any:
    """Round values up to a multiple of ``multiple``."""
    return -(-values // multiple) * multiple


def zigzag(pairs: int, rows: int) -> np.ndarray:
    """Assign pairs to rows back and forth (boustrophedon): return the row of the i-th largest pair, [P].

    Rows of sufficient length for the largest pairs of the data are sufficient for every batch: a batch with smaller
    pairs at each rank has smaller rows.
    """
    lap, place = np.divmod(np.arange(pairs), rows)
    return np.where(lap % 2 == 0, place, rows - 1 - place)


# ---- planning

_CANDIDATE_LENGTHS = 64
_PLAN_LENGTHS = 7
_CANDIDATE_QUANTILES = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
_ACCEPTED_OVERHEAD = 1.05  # ratio of a plan's tokens to the data's tokens that needs no better plan


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
    """Choose at most ``max_shapes`` shapes with the least expected work on batches drawn from the data.

    Args:
        sizes: Size of each pair of the data, [N]: unique tokens, see `PairLengths.sizes_P`. For a stream: the sizes of
            a sample, and the size of the longest possible pair, repeated ``pairs`` times.
        pairs: P, pairs per batch.
        shards: Number of devices that the rows are sharded over. The number of rows is a multiple of it.
        max_shapes: Maximum number of shapes.
        shared_prefix: Length of the common prefix of all sequences of the data, such as a system prompt, in tokens.
        attention_crossover_length: The row length at which attention costs as much as everything else. For a plain
            transformer it is about six times the hidden size.
        micro_batch_work: Fixed cost of an additional micro-batch per device, in tokens: reading the weights again, and
            reading and writing the gradients.
        multiple: Row lengths are multiples of this.
        row_length: Length of all rows. None chooses lengths that fit the data.

    Raises:
        UserError: If ``row_length`` is too short for a pair.
    """
    sizes = np.asarray(sizes)
    if row_length is not None and sizes.max() > row_length:
        raise UserError(
            f"row_length={row_length} is too short: the largest pair takes {sizes.max()} tokens (both sequences, "
            f"their common prefix once), and pairs are never split. Set row_length="
            f"{round_up(int(sizes.max()), 128)} or more, or drop long sequences with a smaller max_length."
        )
    added_N = np.maximum(sizes - shared_prefix, 0)
    added_N = np.concatenate(
        [added_N, np.zeros(max(0, pairs - len(sizes)), int)]
    )  # the data may be smaller than a batch
    unplanned = RowPlan((), (), attention_crossover_length, micro_batch_work * shards)
    planner = _Planner(added_N, pairs, shards, max_shapes, shared_prefix, multiple, row_length, unplanned)
    single = replace(unplanned, update=planner.updates_alone())
    if max_shapes < 2 or len(sizes) < pairs:
        return single
    batches_BP = planner.draw_batches(max(48, 2048 // pairs))
    work_B = planner.covering_work([(shape,) for shape in single.update], batches_BP).min(axis=0)
    work_B[np.isinf(work_B)] = single.work(single.update[-1])  # best fit failed, so `zigzag` places the pairs
    needed = batches_BP.sum() + shared_prefix * shards * len(batches_BP)
    if work_B.sum() / (1 + single.longest / attention_crossover_length) < _ACCEPTED_OVERHEAD * needed:
        return single
    several, several_work = planner.accumulating(batches_BP)
    return several if several_work < work_B.sum() else single


@dataclass(frozen=True)
class _Planner:
    """Plans shapes for `plan_rows`, with its arguments.

    Letters: B batches of P pairs, in descending order of size; C candidates.
    """

    added_N: np.ndarray
    """Tokens that each pair adds to a row that starts with the shared prefix."""
    pairs: int
    shards: int
    max_shapes: int
    shared_prefix: int
    multiple: int
    row_length: int | None
    unplanned: RowPlan
    """A plan with the costs, but without shapes."""

    def draw_batches(self, most: int) -> np.ndarray:
        """Draw at most ``most`` batches of sizes [B, P] as training does: consecutive parts of random orders."""
        generator, whole = np.random.default_rng(0), len(self.added_N) // self.pairs
        orders = (generator.permutation(self.added_N)[: whole * self.pairs] for _ in range(-(-most // whole)))
        return -np.sort(-np.concatenate([order.reshape(whole, -1) for order in orders])[:most], axis=1)

    def updates_alone(self) -> tuple[RowShape, ...]:
        """Choose shapes for batches without accumulation, in ascending order of work.

        Every batch fits into the last shape, since the largest pairs of the data fit into it by `zigzag`.
        """
        worst_P = np.sort(self.added_N)[::-1][: self.pairs]
        holding_all = []
        for rows in range(self.shards, self.pairs + self.shards, self.shards):
            longest = max(int(np.bincount(zigzag(self.pairs, rows), worst_P).max()) + self.shared_prefix, 1)
            if self.row_length is None:
                holding_all.append(RowShape(rows, int(round_up(longest, self.multiple))))
            elif longest <= self.row_length:
                return (RowShape(rows, self.row_length),)
        work = self.unplanned.work
        largest = min(holding_all, key=work)
        batches_BP = self.draw_batches(min(512, max(64, 2**15 // self.pairs)))
        longest = max(worst_P[0], batches_BP.sum(axis=1).max() / self.shards, 1)
        shortest = np.clip(np.median(batches_BP), 1, longest)
        lengths = np.geomspace(shortest, longest, _CANDIDATE_LENGTHS) + self.shared_prefix
        candidates, works = [], []
        for length in np.unique(round_up(np.ceil(lengths).astype(int), self.multiple)).tolist():
            rows_B = round_up(rows_needed(batches_BP, length - self.shared_prefix), self.shards)
            for rows in np.unique(rows_B[rows_B > 0]).tolist():
                candidates.append(RowShape(rows, length))
                works.append(np.where((rows_B > 0) & (rows_B <= rows), work(candidates[-1]), np.inf))
        chosen = {candidates[index] for index in least_work(np.array(works), work(largest), self.max_shapes - 1)}
        return tuple(sorted({shape for shape in chosen if work(shape) < work(largest)} | {largest}, key=work))

    def accumulating(self, batches_BP: np.ndarray) -> tuple[RowPlan, float]:
        """Return the best plan with accumulation, and its total work on the batches."""
        lengths, updates = self._lengths(batches_BP), set[RowShape]()
        for length in lengths:  # try shapes with as many rows as some quantile of the batches needs
            free = length - self.shared_prefix
            for rows in np.quantile(rows_needed(np.minimum(batches_BP, free), free), _CANDIDATE_QUANTILES):
                updates.add(RowShape(int(round_up(int(rows), self.shards)) or self.shards, length))
        candidates = sorted(updates, key=lambda shape: (shape.rows * shape.length, shape.length))
        plans = list[tuple[RowPlan, float]]()
        *shorter, any_pair = (RowShape(self.shards, length) for length in lengths)
        for accumulate in [(any_pair,), *((any_pair, short) for short in shorter if self.max_shapes > 2)]:
            plan = replace(self.unplanned, accumulate=accumulate)
            schedules = [(*before, update) for update in candidates for before in plan.accumulations]
            works_CB = self.covering_work(schedules, batches_BP)
            works_CB = works_CB.reshape(len(candidates), -1, len(batches_BP)).min(axis=1)
            enough = self.pairs * (plan.work(any_pair) + plan.micro_batch_work)
            chosen = least_work(works_CB, enough, self.max_shapes - len(accumulate))
            work = float(np.minimum(works_CB[chosen].min(axis=0), enough).sum())
            shapes = sorted({candidates[index] for index in chosen}, key=plan.work)
            plans.append((replace(plan, update=tuple(shapes)), work))
        return min(plans, key=lambda plan: plan[1])

    def _lengths(self, batches_BP: np.ndarray) -> list[int]:
        """Return candidate row lengths in ascending order. Any pair fits into the last one."""
        if self.row_length is not None:
            return [self.row_length]
        longest = int(self.added_N.max()) + self.shared_prefix
        shortest = min(max(float(np.median(batches_BP)) + self.shared_prefix, 1.0), longest)
        lengths = np.geomspace(shortest, max(longest, 1), _PLAN_LENGTHS).astype(int)
        return np.unique(round_up(lengths, self.multiple)).tolist()

    def covering_work(self, schedules: list[Schedule], batches_BP: np.ndarray) -> np.ndarray:
        """Return the work of each schedule for each batch [C, B]; infinite if the batch does not fit."""
        totals_B = batches_BP.sum(axis=1)
        works_CB = np.full((len(schedules), len(batches_BP)), np.inf)
        for index, schedule in enumerate(schedules):
            lengths = np.array([shape.length - self.shared_prefix for shape in schedule for _ in range(shape.rows)])
            may_fit = np.flatnonzero((totals_B <= lengths.sum()) & (batches_BP[:, 0] <= lengths.max()))
            if len(may_fit):
                fits, _ = best_fit(batches_BP[may_fit], lengths)
                works_CB[index, may_fit[fits]] = self.unplanned.work(*schedule)
        return works_CB


def rows_needed(batches_BP: np.ndarray, length: int) -> np.ndarray:
    """Return the number of rows that best fit needs for each batch, [B]; 0 if a pair is too long.

    The sizes of each batch are in descending order.
    """
    # Any two rows hold more than one row's length: otherwise best fit would have put their pairs into one row.
    rows = min(batches_BP.shape[1], int(2 * batches_BP.sum(axis=1).max() // max(length, 1)) + 2)
    fits_B, free_BR = best_fit(batches_BP, np.full(rows, length))
    return np.where(fits_B, np.maximum((free_BR < length).sum(axis=1), 1), 0)


def best_fit(sizes_BP: np.ndarray, lengths_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place each batch's pairs, in descending order of size, into the fullest row with enough room.

    Returns:
        Whether all pairs of each batch fit, [B], and the free tokens of each row, [B, R].
    """
    free_BR = np.tile(lengths_R, (len(sizes_BP), 1))
    fits_B = np.ones(len(sizes_BP), bool)
    every_B = np.arange(len(sizes_BP))
    for size_B in sizes_BP.T:
        left_BR = free_BR - size_B[:, None]
        row_B = np.where(left_BR >= 0, left_BR, np.iinfo(np.int64).max).argmin(axis=1)
        placed_B = left_BR[every_B, row_B] >= 0
        fits_B &= placed_B
        free_BR[every_B, row_B] -= np.where(placed_B, size_B, 0)
    return fits_B, free_BR


def least_work(works_CB: np.ndarray, largest_work: float, count: int) -> list[int]:
    """Choose ``count`` candidates greedily: each one minimizes the total work, together with the largest shape."""
    chosen: list[int] = []
    best_B = np.full(works_CB.shape[1], largest_work)
    for _ in range(count):
        chosen.append(int(np.minimum(works_CB, best_B).sum(axis=1).argmin()))
        best_B = np.minimum(best_B, works_CB[chosen[-1]])
    return chosen


def bucket_lengths(longest: int, max_lengths: int = 4, multiple: int = 64) -> tuple[int, ...]:
    """Return a few row lengths for padded batches: the longest, rounded up to ``multiple``, and successive halves.

    >>> bucket_lengths(1000)
    (128, 256, 512, 1024)
    >>> bucket_lengths(30)
    (64,)
    """
    halves = (round_up(longest, 2**halvings) // 2**halvings for halvings in range(max_lengths))
    return tuple(sorted({round_up(length, multiple) for length in halves}))
