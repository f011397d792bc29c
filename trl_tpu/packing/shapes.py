"""Lengths of a dataset's rows, and planning of batch shapes from these lengths.

Letters in names of arrays: N data rows, P data rows of a batch, K answers per data row, R token rows, B batches, C
candidates for a plan.
"""

import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import UserError

#: With recurrent layers, shared prefixes in planned rows are multiples of this many tokens.
CHUNK = 64


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the common prefix of each row's answers and of the tails after it, in tokens.

    Attributes:
        tails_NK: Lengths of the tails; 0 for missing answers.
    """

    prefix_N: np.ndarray
    tails_NK: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[tuple[int, ...]]) -> "RowLengths":
        """Make lengths from one tuple per row: tokens of the prefix, then of each tail."""
        pair = (0, 0, 0)  # makes room for two tails
        lengths_KN = np.array(list(itertools.zip_longest(pair, *rows, fillvalue=0)), np.int64)[:, 1:]
        return cls(lengths_KN[0], lengths_KN[1:].T)

    @classmethod
    def joined(cls, parts: Sequence["RowLengths"]) -> "RowLengths":
        """Concatenate the rows of one or more parts."""
        tails = max(part.tails_NK.shape[1] for part in parts)
        widened = [np.pad(part.tails_NK, ((0, 0), (0, tails - part.tails_NK.shape[1]))) for part in parts]
        return cls(np.concatenate([part.prefix_N for part in parts]), np.concatenate(widened))

    @classmethod
    def of_size(cls, size: int) -> "RowLengths":
        """Return the lengths of one pair of ``size`` unique tokens: half in the prompt, a quarter in each answer."""
        answer = max(1, size // 4)
        return cls.of([(size - 2 * answer, answer, answer)])

    def __len__(self) -> int:
        return len(self.prefix_N)

    @property
    def sizes_N(self) -> np.ndarray:
        """Number of unique tokens of each row: the prefix counts once."""
        return self.prefix_N + self.tails_NK.sum(axis=1)

    def in_chunks(self, chunk: int) -> "RowLengths":
        """Return the lengths in whole chunks: prefixes rounded down, tails rounded up.

        Prefix tokens after the last whole chunk become part of every tail.
        """
        prefix_N = self.prefix_N // chunk * chunk
        tails_NK = self.tails_NK + (self.prefix_N - prefix_N)[:, None]
        return RowLengths(prefix_N, -(-tails_NK // chunk) * chunk)

    @property
    def longest_N(self) -> np.ndarray:
        """Length of the longest sequence of each row, in tokens."""
        return self.prefix_N + self.tails_NK.max(axis=1, initial=0)

    def attended(self, window: int | None = None) -> int:
        """Count the (query, key) pairs of causal attention over all unique tokens.

        Args:
            window: Maximum number of keys per query, the query's own token included; None for no limit.
        """

        def entries(length_N: np.ndarray) -> np.ndarray:
            windowed_N = length_N if window is None else np.minimum(length_N, window)
            return windowed_N * (windowed_N + 1) // 2 + (length_N - windowed_N) * (window or 0)

        shared_N = entries(self.prefix_N)
        return int((shared_N + sum(entries(self.prefix_N + tail_N) - shared_N for tail_N in self.tails_NK.T)).sum())


# ---- shapes and plans


@dataclass(frozen=True)
class BatchShape:
    """Shape of a micro-batch: the number of token rows, and tokens per token row."""

    rows: int
    length: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.length}"


#: The shapes of one batch's micro-batches, in order. The last micro-batch ends with an update.
Schedule = tuple[BatchShape, ...]

_MAX_ACCUMULATED = 3  # maximum of accumulating micro-batches per batch in planning; rare batches need more


@dataclass(frozen=True)
class ShapePlan:
    """The batch shapes of a run.

    Without `accumulate`, the last shape of `update` holds any batch. With `accumulate`, its longest token row holds
    any data row, so enough micro-batches hold any batch.

    Args:
        update: Shapes for the micro-batch that ends a batch with an update; at least one shape.
        accumulate: Shapes for the micro-batches before it. They only accumulate gradients.
        attention_crossover_length: The length at which attention costs as much as everything else.
        micro_batch_work: Fixed cost of an additional micro-batch, in tokens.
        chunk: Lengths of sequences and of shared prefixes are multiples of this many tokens.
    """

    update: tuple[BatchShape, ...]
    accumulate: tuple[BatchShape, ...] = ()
    attention_crossover_length: float = 4096
    micro_batch_work: float = 0
    chunk: int = 1

    def __str__(self) -> str:
        shapes = " or ".join(map(str, self.update))
        suffix = f", after micro-batches of {' or '.join(map(str, self.accumulate))} if a batch needs them"
        return shapes + (suffix if self.accumulate else "")

    @property
    def shapes(self) -> tuple[BatchShape, ...]:
        """All shapes. Each shape is compiled as one program."""
        return (*self.accumulate, *self.update)

    @property
    def longest(self) -> int:
        """The length of the longest token row, an upper bound for the size of a data row."""
        return max(shape.length for shape in self.shapes)

    def work(self, *schedule: BatchShape) -> float:
        """Return the cost of all micro-batches of a schedule in tokens: 1 is the cost of a token without attention."""
        length = self.attention_crossover_length  # attention is quadratic in the length
        computed = sum(shape.rows * shape.length * (1 + shape.length / length) for shape in schedule)
        return computed + (len(schedule) - 1) * self.micro_batch_work

    @cached_property
    def usual_schedules(self) -> list[Schedule]:
        """An update after all combinations of few `accumulate` shapes that planning tries, cheapest first."""
        counts = range(_MAX_ACCUMULATED + 1)
        combinations = [itertools.combinations_with_replacement(self.accumulate, count) for count in counts]
        schedules = ((*before, update) for before in itertools.chain(*combinations) for update in self.update)
        return sorted(schedules, key=lambda schedule: self.work(*schedule))

    def schedules(self) -> Iterator[Schedule]:
        """Yield schedules, cheapest first. With `accumulate`, schedules with ever more micro-batches follow."""
        yield from self.usual_schedules
        if not self.accumulate:
            return
        longest = max(self.accumulate, key=lambda shape: shape.length)
        for count in itertools.count(_MAX_ACCUMULATED + 1):
            yield (longest,) * count + self.update[-1:]

    def usual(self, sizes_N: np.ndarray, batch_size: int, shared_prefix: int = 0) -> BatchShape:
        """Return the shape of most batches of data rows with these sizes; of a batch's last micro-batch, if several.

        The other arguments are those of `ShapePlanner`.
        """
        generator, counts = np.random.default_rng(0), Counter[BatchShape]()
        for _ in range(64):
            sizes = sorted((generator.choice(sizes_N, batch_size) - shared_prefix).tolist(), reverse=True)
            for schedule in self.schedules():
                free = sorted(shape.length - shared_prefix for shape in schedule for _ in range(shape.rows))
                if best_fit(sizes, free):
                    break
            counts[schedule[-1]] += 1  # without `accumulate`, the last shape holds every batch
        return counts.most_common(1)[0][0]


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    at = int(differs.argmax()) if length else 0  # argmax returns the first mismatch, or 0
    return at if length and differs[at] else length


def attention_crossover_length(hidden_size: int) -> float:
    """Return the length at which attention takes as many operations as the linear layers, in a plain transformer.

    Per token, a layer of hidden size H takes 12 H^2 multiplications in linear layers, and 2 H L in attention over L
    tokens.
    """
    return 6 * hidden_size


def round_up(values: Any, multiple: int) -> Any:
    """Round values up to a multiple of ``multiple``."""
    return -(-values // multiple) * multiple


def zigzag(batch_size: int, token_rows: int) -> np.ndarray:
    """Assign data rows to token rows back and forth: return the token row of the i-th largest data row, [P].

    Token rows that hold the largest rows of the data hold every batch, because the i-th largest row of a batch is at
    most as large as the i-th largest row of the data.
    """
    lap, place = np.divmod(np.arange(batch_size), token_rows)
    return np.where(lap % 2 == 0, place, token_rows - 1 - place)


# ---- planning

_CANDIDATE_LENGTHS = 64  # lengths to try in plans without accumulation
_PLAN_LENGTHS = 7  # lengths to try in plans with accumulation
_CANDIDATE_QUANTILES = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)  # of the row counts that batches need
_ACCEPTED_OVERHEAD = 1.05  # tokens in a plan's token rows per token of the data; below this, planning stops


@dataclass(frozen=True)
class ShapePlanner:
    """Chooses at most ``max_shapes`` shapes with the least expected work on batches drawn from the data.

    Batches [B, P] are sizes of data rows as in `added_N`, in descending order.

    Args:
        sizes_N: Unique tokens of each row of the data: see `RowLengths.sizes_N`. For a stream: the sizes of a sample,
            followed by ``batch_size`` copies of the largest possible size.
        batch_size: P, data rows per batch.
        shards: Number of devices that the token rows are sharded over. Their number is a multiple of it.
        max_shapes: Maximum number of shapes.
        shared_prefix: Length of the common prefix of all sequences of the data, such as a system prompt, in tokens.
        attention_crossover_length: The length at which attention costs as much as everything else. For a plain
            transformer it is about six times the hidden size.
        micro_batch_work: Fixed cost of an additional micro-batch per device, in tokens: reading the weights again, and
            reading and writing the gradients.
        multiple: Lengths of token rows are multiples of this.
        row_length: Length of all token rows. None chooses lengths that fit the data.
    """

    sizes_N: np.ndarray
    batch_size: int
    shards: int = 1
    max_shapes: int = 4
    shared_prefix: int = 0
    attention_crossover_length: float = 4096
    micro_batch_work: float = 512
    multiple: int = 32
    row_length: int | None = None

    def plan(self) -> ShapePlan:
        """Return the planned shapes.

        Raises:
            UserError: If ``row_length`` is too short for a data row.
        """
        if self.row_length is not None and (most := int(self.sizes_N.max())) > self.row_length:
            raise UserError(f"row_length={self.row_length} is too short: a row of the data takes {most} tokens.")
        update_only = replace(self.unplanned, update=self.update_only_shapes())
        if self.max_shapes < 2 or len(self.sizes_N) < self.batch_size:
            return update_only
        batches_BP = self.draw_batches(max(48, 2048 // self.batch_size))
        work_B = self.covering_work(update_only, batches_BP)
        # best fit failed: `zigzag` places the rows
        work_B[np.isinf(work_B)] = update_only.work(update_only.update[-1])
        data_tokens = batches_BP.sum() + self.shared_prefix * self.shards * len(batches_BP)
        # a lower bound of the tokens in the token rows, since work is at most tokens x (1 + longest / crossover)
        least_tokens = work_B.sum() / (1 + update_only.longest / self.attention_crossover_length)
        if least_tokens < _ACCEPTED_OVERHEAD * data_tokens:
            return update_only
        accumulating, accumulating_work = self.accumulating_plan(batches_BP)
        return accumulating if accumulating_work < work_B.sum() else update_only

    @cached_property
    def added_N(self) -> np.ndarray:
        """Tokens that each data row adds to a token row that starts with the shared prefix; at least P rows."""
        added_N = np.maximum(self.sizes_N - self.shared_prefix, 0)
        return np.pad(added_N, (0, max(0, self.batch_size - len(added_N))))

    @cached_property
    def unplanned(self) -> ShapePlan:
        """A plan with the costs, but without shapes."""
        return ShapePlan((), (), self.attention_crossover_length, self.micro_batch_work * self.shards)

    def draw_batches(self, most: int) -> np.ndarray:
        """Draw at most ``most`` batches [B, P] as training does: consecutive parts of random permutations."""
        generator, per_epoch = np.random.default_rng(0), len(self.added_N) // self.batch_size
        drawn, epochs = per_epoch * self.batch_size, -(-most // per_epoch)
        orders = [generator.permutation(self.added_N)[:drawn] for _ in range(epochs)]
        return -np.sort(-np.concatenate(orders).reshape(-1, self.batch_size)[:most], axis=1)

    def update_only_shapes(self) -> tuple[BatchShape, ...]:
        """Choose shapes without accumulation, in ascending order of work.

        The last shape holds every batch, because it holds the largest rows of the data as placed by `zigzag`.
        """
        largest_P = np.sort(self.added_N)[::-1][: self.batch_size]
        work, counts = self.unplanned.work, range(self.shards, self.batch_size + self.shards, self.shards)

        def longest_of(rows: int) -> int:
            fullest = int(np.bincount(zigzag(self.batch_size, rows), largest_P).max())
            return max(fullest + self.shared_prefix, 1)

        if (length := self.row_length) is not None:  # a token row for each data row is enough
            return (BatchShape(next(rows for rows in counts if longest_of(rows) <= length), length),)
        sufficient = [BatchShape(rows, int(round_up(longest_of(rows), self.multiple))) for rows in counts]
        fallback = min(sufficient, key=work)
        batches_BP = self.draw_batches(min(512, max(64, 2**15 // self.batch_size)))
        # token rows longer than the largest data row and than every batch's part per shard gain nothing
        longest = max(largest_P[0], batches_BP.sum(axis=1).max() / self.shards, 1)
        shortest = np.clip(np.median(batches_BP), 1, longest)
        lengths = np.geomspace(shortest, longest, _CANDIDATE_LENGTHS) + self.shared_prefix
        candidates, works = [fallback], [np.full(len(batches_BP), work(fallback))]
        enough = work(fallback)  # work of the cheapest known shape that holds every batch
        tokens = batches_BP.sum(axis=1).min()
        for length in np.unique(round_up(np.ceil(lengths).astype(int), self.multiple)).tolist():
            fewest = int(round_up(-(-tokens // (length - self.shared_prefix)), self.shards))
            if work(BatchShape(fewest, length)) >= enough:
                continue
            rows_B = round_up(token_rows_needed(batches_BP, length - self.shared_prefix), self.shards)
            if rows_B.all():
                enough = min(enough, work(BatchShape(int(rows_B.max()), length)))
            for rows in np.unique(rows_B[rows_B > 0]).tolist():
                candidates.append(BatchShape(rows, length))
                works.append(np.where((rows_B > 0) & (rows_B <= rows), work(candidates[-1]), np.inf))
        chosen = {candidates[index] for index in least_work(np.array(works), work(fallback), self.max_shapes - 1)}
        return tuple(sorted({shape for shape in chosen if work(shape) < work(fallback)} | {fallback}, key=work))

    def accumulating_plan(self, batches_BP: np.ndarray) -> tuple[ShapePlan, float]:
        """Return the best plan with accumulation, and its total work on the batches."""
        longest = int(self.added_N.max()) + self.shared_prefix
        shortest = min(max(float(np.median(batches_BP)) + self.shared_prefix, 1.0), longest)
        tried = np.geomspace(shortest, max(longest, 1), _PLAN_LENGTHS).astype(int)
        # ascending; any data row fits into the last one
        lengths = np.unique(round_up(tried, self.multiple)).tolist() if self.row_length is None else [self.row_length]
        updates = set[BatchShape]()
        for length in lengths:  # numbers of token rows for a quantile of the batches
            room = length - self.shared_prefix
            for rows in np.quantile(token_rows_needed(np.minimum(batches_BP, room), room), _CANDIDATE_QUANTILES):
                updates.add(BatchShape(int(round_up(int(rows), self.shards)) or self.shards, length))
        candidates = sorted(updates, key=lambda shape: (shape.rows * shape.length, shape.length))
        plans = list[tuple[ShapePlan, float]]()
        *shorter, longest_shape = (BatchShape(self.shards, length) for length in lengths)
        for accumulate in [(longest_shape,), *((longest_shape, short) for short in shorter if self.max_shapes > 2)]:
            plan = replace(self.unplanned, accumulate=accumulate)
            plans_C = (replace(plan, update=(update,)) for update in candidates)
            works_CB = np.array([self.covering_work(candidate, batches_BP) for candidate in plans_C])
            # fallback: a micro-batch per data row
            fallback_work = self.batch_size * (plan.work(longest_shape) + plan.micro_batch_work)
            chosen = least_work(works_CB, fallback_work, self.max_shapes - len(accumulate))
            work = float(np.minimum(works_CB[chosen].min(axis=0), fallback_work).sum())
            shapes = sorted({candidates[index] for index in chosen}, key=plan.work)
            plans.append((replace(plan, update=tuple(shapes)), work))
        return min(plans, key=lambda plan: plan[1])

    def covering_work(self, plan: ShapePlan, batches_BP: np.ndarray) -> np.ndarray:
        """Return the work of the cheapest usual schedule that holds each batch, [B]; infinite if none does."""
        totals_B, works_B = batches_BP.sum(axis=1), np.full(len(batches_BP), np.inf)
        for schedule in plan.usual_schedules:
            free = sorted(shape.length - self.shared_prefix for shape in schedule for _ in range(shape.rows))
            may_fit_B = np.isinf(works_B) & (totals_B <= sum(free)) & (batches_BP[:, 0] <= free[-1])
            for batch in np.flatnonzero(may_fit_B).tolist():
                if best_fit(batches_BP[batch].tolist(), free.copy()):
                    works_B[batch] = plan.work(*schedule)
        return works_B


def token_rows_needed(batches_BP: np.ndarray, length: int) -> np.ndarray:
    """Return the number of token rows that best fit needs for each batch, [B]; 0 if a data row is too long.

    The sizes of each batch are in descending order.
    """
    rows_B = np.zeros(len(batches_BP), np.int64)
    for batch in np.flatnonzero(batches_BP[:, 0] <= length).tolist():
        free = list[int]()
        best_fit(batches_BP[batch].tolist(), free, length)
        rows_B[batch] = len(free)
    return rows_B


def best_fit(sizes: list[int], free: list[int], length: int = -1) -> bool:
    """Place data rows, in descending order of size, into the fullest token row with room. Return whether all fit.

    Args:
        free: Free tokens of each token row, ascending; updated for the placed data rows.
        length: Length of token rows that are added if none has enough room; by default none are added.
    """
    for size in sizes:
        at = bisect_left(free, size)
        if at == len(free) and size > length:
            return False
        insort(free, (free.pop(at) if at < len(free) else length) - size)
    return True


def least_work(works_CB: np.ndarray, largest_work: float, count: int) -> list[int]:
    """Choose ``count`` candidates greedily, each to minimize the total work over all batches.

    Every batch uses the cheapest chosen candidate that it fits into, or a fallback with the work ``largest_work``.
    """
    chosen: list[int] = []
    best_B = np.full(works_CB.shape[1], largest_work)
    for _ in range(count):
        chosen.append(int(np.minimum(works_CB, best_B).sum(axis=1).argmin()))
        best_B = np.minimum(best_B, works_CB[chosen[-1]])
    return chosen


def bucket_lengths(longest: int, max_lengths: int = 4, multiple: int = 64) -> tuple[int, ...]:
    """Return a few lengths for padded batches: the longest, rounded up to ``multiple``, and successive halves.

    >>> bucket_lengths(1000)
    (128, 256, 512, 1024)
    >>> bucket_lengths(30)
    (64,)
    """
    halves = (round_up(longest, 2**halvings) // 2**halvings for halvings in range(max_lengths))
    return tuple(sorted({round_up(length, multiple) for length in halves}))
