"""How a run's batches are cut into passes of few shapes. numpy only.

A pass is one forward and backward over packed rows of one shape; a batch takes any number of *partial* passes, which
only add up gradients, and then one *final* pass, which also updates. XLA compiles one program for each shape of either
kind. Few shapes then make many totals: with a partial shape of 600 tokens, final shapes of 800, 1,000 and 1,200 cover
every batch above 600 to within 200 tokens, where three shapes alone would leave a third of the columns empty.

Letters: B batches, P pairs, R rows, L length of a row, C candidate shapes.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .shapes import RowShape, draw_batches, least_work, plan_shapes, round_up, rows_needed, snake

Way = tuple[RowShape, ...]
"""The passes of one batch, in order; the last is the final one."""

_MOST_PARTIAL_PASSES = 3  # that are planned for; rarer batches take more
_CANDIDATE_LENGTHS = 7
_CANDIDATE_QUANTILES = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
_GOOD_ENOUGH = 1.05  # times the tokens themselves


@dataclass(frozen=True)
class RowPlan:
    """The row shapes of a run.

    Without `partial`, the last of `final` holds any batch. With it, the longest row of `partial` holds any pair, so
    that enough passes hold any batch.

    Args:
        final: The shapes of passes that end a batch, at least one.
        partial: The shapes of passes that come before.
        attention_length: The row length at which attention costs as much as everything else.
        pass_work: What one more pass costs by itself, in tokens.
    """

    final: tuple[RowShape, ...]
    partial: tuple[RowShape, ...] = ()
    attention_length: float = 4096
    pass_work: float = 0

    def __str__(self) -> str:
        shapes = " or ".join(map(str, self.final))
        before = f", after passes of {' or '.join(map(str, self.partial))} where a batch needs them"
        return shapes + (before if self.partial else "")

    @property
    def shapes(self) -> tuple[RowShape, ...]:
        """All shapes, of which each is one program."""
        return (*self.partial, *self.final)

    @property
    def longest(self) -> int:
        """The length of the longest row, which no pair may exceed."""
        return max(shape.length for shape in self.shapes)

    def work(self, way: Way) -> float:
        """What a way's passes cost, in tokens."""
        return sum(shape.work(self.attention_length) for shape in way) + (len(way) - 1) * self.pass_work

    @cached_property
    def _usual_ways(self) -> tuple[Way, ...]:
        before = [way for count in range(_MOST_PARTIAL_PASSES + 1) for way in self._partial_passes(count)]
        return tuple(sorted(((*way, final) for way in before for final in self.final), key=self.work))

    def _partial_passes(self, count: int) -> Iterator[Way]:
        return itertools.combinations_with_replacement(self.partial, count)

    def ways(self) -> Iterator[Way]:
        """Ways to cut a batch, the cheapest first; with partial shapes without end."""
        yield from self._usual_ways
        if not self.partial:
            return
        longest = max(self.partial, key=lambda shape: shape.length)
        for count in itertools.count(_MOST_PARTIAL_PASSES + 1):
            yield (longest,) * count + self.final[-1:]


def plan_rows(
    sizes: np.ndarray,
    pairs: int,
    shards: int = 1,
    *,
    most: int = 4,
    common: int = 0,
    attention_length: float = 4096,
    pass_work: float = 128,
    multiple: int = 32,
    row_length: int | None = None,
    seed: int = 0,
) -> RowPlan:
    """At most ``most`` shapes, chosen for the least expected work on batches drawn from the data's own sizes.

    Args:
        sizes, pairs, shards, most, common, attention_length, multiple, seed: As in `plan_shapes`.
        pass_work: What one more pass costs by itself on each device, in tokens: reading the weights again, and reading
            and writing the gradients.
        row_length: The length of all rows, instead of lengths that fit the data.

    Raises:
        ValueError: As `plan_shapes`, and if ``row_length`` is too short for a pair.
    """
    settings: dict[str, Any] = {
        "common": common,
        "attention_length": attention_length,
        "multiple": multiple,
        "seed": seed,
    }
    if row_length is None:
        shapes = plan_shapes(sizes, pairs, shards, most=most, **settings)
    else:
        shapes = (_rows_of(row_length, sizes, pairs, shards, common),)
    single = RowPlan(shapes, (), attention_length, pass_work * shards)
    added = np.maximum(np.asarray(sizes) - common, 0)
    if most < 2 or len(added) < pairs:
        return single
    batches_BP = -np.sort(-draw_batches(added, pairs, seed, most=max(48, 2048 // pairs)), axis=1)
    work_B = covering_work([(shape, ()) for shape in single.final], single, batches_BP, common).min(axis=0)
    work_B[np.isinf(work_B)] = single.work(single.final[-1:])  # dealt out, where best fit fails
    needed = batches_BP.sum() + common * shards * len(batches_BP)
    if work_B.sum() / (1 + single.longest / attention_length) < _GOOD_ENOUGH * needed:
        return single
    if row_length is None:
        longest = int(added.max()) + common
        lengths = _lengths(batches_BP, longest, common, multiple)
        any_pair = RowShape(shards, int(round_up(max(longest, 1), multiple)))
    else:
        lengths, any_pair = np.array([row_length]), RowShape(shards, row_length)
    several, several_work = _plan_passes(batches_BP, lengths, any_pair, most, common, single)
    return several if several_work < work_B.sum() else single


def _rows_of(length: int, sizes: np.ndarray, pairs: int, shards: int, common: int) -> RowShape:
    """As many rows of ``length`` as the largest pairs of the data need, dealt out: they hold every batch.

    Raises:
        ValueError: If a pair is longer.
    """
    if sizes.max() > length:
        raise ValueError(
            f"row_length={length} is too short: the largest pair takes {sizes.max()} tokens (both dialogues, their "
            f"common prefix once), and pairs are never cut. Choose row_length={round_up(int(sizes.max()), 128)} or "
            "more, or leave out long dialogues with a smaller max_length."
        )
    worst_P = np.sort(np.maximum(sizes - common, 0))[::-1][:pairs]
    rows = shards
    while np.bincount(snake(len(worst_P), rows), worst_P).max() + common > length:
        rows += shards
    return RowShape(rows, length)


def _lengths(batches_BP: np.ndarray, longest: int, common: int, multiple: int) -> np.ndarray:
    shortest = min(max(float(np.median(batches_BP)) + common, 1.0), longest)
    return np.unique(round_up(np.geomspace(shortest, max(longest, 1), _CANDIDATE_LENGTHS).astype(int), multiple))


def _plan_passes(
    batches_BP: np.ndarray, lengths: np.ndarray, any_pair: RowShape, most: int, common: int, like: RowPlan
) -> tuple[RowPlan, float]:
    """The best plan with partial passes, and its total work on the batches."""
    shards = any_pair.rows
    finals = _finals(batches_BP, lengths, shards, common)
    best: tuple[RowPlan, float] | None = None
    others = [RowShape(shards, int(length)) for length in lengths if length < any_pair.length]
    for partial in [(any_pair,), *((any_pair, other) for other in others if most > 2)]:
        plan = RowPlan((), partial, like.attention_length, like.pass_work)
        before = [way for count in range(_MOST_PARTIAL_PASSES + 1) for way in plan._partial_passes(count)]
        works_CB = covering_work([(final, way) for final in finals for way in before], plan, batches_BP, common)
        works_CB = works_CB.reshape(len(finals), len(before), -1).min(axis=1)
        enough = batches_BP.shape[1] * (any_pair.work(like.attention_length) + like.pass_work)
        chosen = least_work(works_CB, enough, most - len(partial))
        work = float(np.minimum(works_CB[chosen].min(axis=0), enough).sum())
        if best is None or work < best[1]:
            shapes = sorted({finals[index] for index in chosen}, key=lambda shape: shape.work(like.attention_length))
            best = RowPlan(tuple(shapes), partial, like.attention_length, like.pass_work), work
    assert best is not None
    return best


def _finals(batches_BP: np.ndarray, lengths: np.ndarray, shards: int, common: int) -> list[RowShape]:
    """Final shapes worth trying: for each length, the rows that some part of the batches needs."""
    finals = set()
    for length in lengths.tolist():
        rows_B = rows_needed(np.minimum(batches_BP, length - common), length - common)
        for rows in np.quantile(rows_B, _CANDIDATE_QUANTILES):
            finals.add(RowShape(int(round_up(int(rows), shards)) or shards, length))
    return sorted(finals, key=lambda shape: (shape.rows * shape.length, shape.length))


def covering_work(
    ways: "list[tuple[RowShape, Way]]", plan: RowPlan, batches_BP: np.ndarray, common: int
) -> np.ndarray:
    """The work of each way (final shape, partial shapes) for each batch [C, B]; infinite where the batch does not fit.

    Args:
        batches_BP: Sizes without the ``common`` first tokens, in descending order.
    """
    totals_B = batches_BP.sum(axis=1)
    works_CB = np.full((len(ways), len(batches_BP)), np.inf)
    for index, (final, before) in enumerate(ways):
        lengths = np.array([shape.length - common for shape in (*before, final) for _ in range(shape.rows)])
        may_fit = np.flatnonzero((totals_B <= lengths.sum()) & (batches_BP[:, 0] <= lengths.max()))
        if len(may_fit):
            fits = _fits(batches_BP[may_fit], lengths)
            works_CB[index, may_fit[fits]] = plan.work((*before, final))
    return works_CB


def _fits(batches_BP: np.ndarray, lengths_R: np.ndarray) -> np.ndarray:
    """Whether best fit, the largest pair first, finds room for each batch in rows of the given lengths, [B]."""
    free_BR = np.tile(lengths_R, (len(batches_BP), 1))
    fits_B = np.ones(len(batches_BP), bool)
    each = np.arange(len(batches_BP))
    for size_B in batches_BP.T:
        left_BR = free_BR - size_B[:, None]
        row_B = np.where(left_BR >= 0, left_BR, np.iinfo(np.int64).max).argmin(axis=1)
        placed_B = left_BR[each, row_B] >= 0
        fits_B &= placed_B
        free_BR[each, row_B] -= np.where(placed_B, size_B, 0)
    return fits_B
