"""Packed rows keep the attention, positions and scored tokens of their sequences, in a few planned shapes."""

import os
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import real_pairs
from decoders import PAD, drawn_pair, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from preference_rows import dataset_of, to_columns

from trl_tpu.data.collate import ComparisonRule, sequences_of
from trl_tpu.data.length_stats import length_stats
from trl_tpu.packing.batch import Batch
from trl_tpu.packing.pack import expand_rows, pack, pack_unpadded
from trl_tpu.packing.shapes import BatchShape, ShapePlan, ShapePlanner, bucket_lengths

batches = st.lists(drawn_pair, min_size=1, max_size=7)
Rows = Batch[np.ndarray]


def pair_size(one: list[int], other: list[int]) -> int:
    return len(one) + len(other) - len(os.path.commonprefix([one, other]))


def present_pairs(rows: Rows) -> np.ndarray:
    """Return the indices of the pairs in these rows."""
    return rows.tokens_S.reshape(-1, 2)[:, 0] > 0


def micro_batches(pairs: list[Any], plan: ShapePlan, size: int | None = None, **kwargs: Any) -> list[Rows]:
    return pack(rows_of(pairs, size), plan, **kwargs)


def packed(pairs: list[Any], shapes: Any = None, size: int | None = None, **kwargs: Any) -> Rows:
    """Pack into one micro-batch; without ``shapes``, into three rows that each hold half of the tokens."""
    sizes = [pair_size(*pair) for pair in pairs]
    shapes = shapes or [BatchShape(3, max(*sizes, -(-sum(sizes) // 2)))]
    (batch,) = micro_batches(pairs, ShapePlan(tuple(shapes)), size, **kwargs)
    return batch


def unpadded(pairs: list[Any], attention_crossover_length: float = 50) -> Rows:
    return pack_unpadded(rows_of(pairs), attention_crossover_length)[0]


def seen_by(batch: Rows, row: int, column: int) -> np.ndarray:
    """Return the columns a token attends to, by the definition of ``subtree_end``."""
    return np.flatnonzero((np.arange(len(batch.subtree_end_RL[row])) <= column) & (column < batch.subtree_end_RL[row]))


def read_back(batch: Rows, pair: int, half: int) -> list[int]:
    row, column = batch.token_row_S[2 * pair + half], batch.token_column_S[2 * pair + half]
    return batch.input_ids_RL[row, seen_by(batch, row, column)].tolist()


@pytest.mark.parametrize("layout", [packed, unpadded])
@given(pairs=batches)
def test_tokens_attend_to_their_prefix_at_positions_from_zero(layout: Any, pairs: list[Any]) -> None:
    batch = layout(pairs)
    assert layout is packed or (len(batch.input_ids_RL) == 1 and (batch.input_ids_RL != PAD).all())
    for index, sequences in enumerate(pairs):
        assert [read_back(batch, index, half) for half in (0, 1)] == list(map(list, sequences))
        assert batch.token_row_S[2 * index] == batch.token_row_S[2 * index + 1]
    found = set()
    for row, column in zip(*np.nonzero(batch.input_ids_RL != PAD), strict=True):
        path = seen_by(batch, row, column)
        assert batch.position_ids_RL[row, path].tolist() == list(range(len(path)))
        assert path[-1] == column
        found.add(tuple(batch.input_ids_RL[row, path].tolist()))
    assert found == {tuple(ids[: end + 1]) for pair in pairs for ids in pair for end in range(len(ids))}


@given(batches)
def test_rows_hold_each_prefix_once_followed_by_padding(pairs: list[Any]) -> None:
    batch = packed(pairs)
    for row, ids in enumerate(batch.input_ids_RL):
        held = [pair for index, pair in enumerate(pairs) if batch.token_row_S[2 * index] == row]
        beginnings = {tuple(ids[: end + 1]) for pair in held for ids in pair for end in range(len(ids))}
        used = len(beginnings)
        assert (ids[:used] != PAD).all() and (ids[used:] == PAD).all()
        assert (batch.subtree_end_RL[row, :used] <= used).all()
        for column in range(used, len(ids)):
            assert seen_by(batch, row, column).tolist() == [column]
            assert batch.position_ids_RL[row, column] == 0


@pytest.mark.parametrize(
    ("ids", "scored"), [([5, 6, PAD], 2), ([5, PAD, 6, PAD, PAD], 3), ([PAD, PAD], 1), ([PAD], 1), ([5, 6], 2)]
)
def test_sequences_are_scored_at_their_last_non_padding_token(ids: list[int], scored: int) -> None:
    batch = packed([(ids, [7, 8, 9])], [BatchShape(2, 16)])
    assert read_back(batch, 0, 0) == ids[:scored]
    assert batch.tokens_S.tolist() == [len(ids), 3]


@given(batches, st.integers(0, 3))
def test_short_batch_has_the_shapes_of_a_full_batch(pairs: list[Any], missing: int) -> None:
    count, size = len(pairs), len(pairs) + missing
    batch = packed(pairs, size=size)
    assert {getattr(batch, name).shape for name in ("token_row_S", "token_column_S", "tokens_S")} == {(2 * size,)}
    assert present_pairs(batch).tolist() == [True] * count + [False] * missing
    assert batch.tokens_S.tolist() == [len(ids) for pair in pairs for ids in pair] + [0, 0] * missing
    assert not batch.token_row_S[2 * count :].any() and not batch.token_column_S[2 * count :].any()
    integers = ("input_ids_RL", "position_ids_RL", "subtree_end_RL", "token_row_S", "token_column_S", "tokens_S")
    assert {getattr(batch, name).dtype for name in integers} == {np.dtype(np.int32)}


def test_batch_gets_the_first_shape_that_holds_it() -> None:
    shapes = (BatchShape(1, 8), BatchShape(2, 8), BatchShape(2, 16))
    long, short = ([1] * 8, [1] * 8), ([2, 3], [2, 4])
    assert packed([short, short], shapes, 3).input_ids_RL.shape == (1, 8)
    assert packed([short, long], shapes, 3).input_ids_RL.shape == (2, 8)
    assert packed([([1] * 9, [1] * 8)], shapes, 3).input_ids_RL.shape == (2, 16)


def test_pairs_of_a_ranking_share_its_prompt_and_all_answers() -> None:
    """Each of two rankings takes 10 + 4 x 5 tokens, however its pairs are ordered."""
    rankings = [[[prompt] * 10 + [answer] * 5 for answer in (3, 4, 5, 6)] for prompt in (1, 2)]
    pairs = [pair for both in zip(*(combinations(ranking, 2) for ranking in rankings), strict=True) for pair in both]
    assert packed(pairs, [BatchShape(2, 30), BatchShape(2, 64)]).input_ids_RL.shape == (2, 30)


def test_oversized_pairs_raise_and_are_never_truncated() -> None:
    shapes = (BatchShape(2, 8),)
    with pytest.raises(ValueError, match="2 rows .*largest of 9.*2 x 8"):
        packed([([1], [2]), ([3] * 5, [4] * 4)], shapes)
    with pytest.raises(ValueError, match="3 rows .*24 tokens.*2 x 8"):
        packed([([1 + index] * 4, [11 + index] * 4) for index in range(3)], shapes)
    prompt = list(range(10, 20))
    pairs = [([*prompt, 1], [*prompt, 2, 3]), ([*prompt, 4], [*prompt, 5])]
    with pytest.raises(ValueError, match="23 tokens.* 22"):
        expand_rows(packed(pairs, [BatchShape(1, 22)]))
    assert (expand_rows(packed(pairs, [BatchShape(1, 23)])).segment_R2L[0] > 0).sum(axis=-1).tolist() == [22, 23]


def test_prompt_shared_by_all_data_is_planned_once_per_row() -> None:
    sizes = np.full(100, 120)  # 100 tokens of a system prompt and 20 more
    apart, shared = (
        ShapePlanner(sizes, 8, max_shapes=1, shared_prefix=common).plan().update[0] for common in (0, 100)
    )
    assert apart.rows * apart.length >= 8 * 120
    assert shared.rows * shared.length <= 100 + 8 * 20 + 32
    prompt = [1] * 100
    pairs = [(prompt + [2 + index] * 19, prompt + [100 + index]) for index in range(8)]
    assert packed(pairs, [shared]).input_ids_RL.size == shared.rows * shared.length


def test_trees_grow_if_sharing_saves_more_than_attention_costs() -> None:
    prompt = list(range(10, 40))
    pairs = [(prompt + [1, 2], prompt + [3]), (prompt + [4], prompt + [5]), ([10, 6], [10, 7])]
    assert len(unpadded(pairs, 1e9).trees or ()) == 1  # attention costs nothing: every shared token is shared
    assert len(unpadded(pairs, 50).trees or ()) > 1  # one common token does not justify a larger tree
    apart = unpadded([([1] * 9, [2] * 9), ([3] * 9, [4] * 9)]).trees or ()  # no shared tokens
    assert [(tree.start, tree.stop, len(tree.tails)) for tree in apart] == [(at, at + 9, 1) for at in (0, 9, 18, 27)]


@given(batches, st.integers(1, 3), st.integers(0, 2))
def test_micro_batches_hold_each_pair_once(pairs: list[Any], rows: int, missing: int) -> None:
    most = max(pair_size(*pair) for pair in pairs)
    plan = ShapePlan((BatchShape(rows, most), BatchShape(rows + 1, 8)), (BatchShape(rows, most), BatchShape(1, 6)))
    some = micro_batches(pairs, plan, len(pairs) + missing)
    assert [BatchShape(*rows.input_ids_RL.shape) in plan.accumulate for rows in some[:-1]] == [True] * (len(some) - 1)
    assert BatchShape(*some[-1].input_ids_RL.shape) in plan.update
    assert sum(present_pairs(rows).astype(int) for rows in some).tolist() == [1] * len(pairs) + [0] * missing


@given(batches, st.integers(2, 3), st.booleans())
def test_parts_of_processes_concatenate_to_the_whole_batch(pairs: list[Any], parts: int, expands: bool) -> None:
    """All parts have the same shapes, and each pair is in one part. Rows without room for the expansion raise."""
    longest = max(pair_size(*pair) for pair in pairs)
    plan = ShapePlan((BatchShape(parts, longest), BatchShape(2 * parts, 8)), (BatchShape(parts, longest),))
    whole = micro_batches(pairs, plan, expands=expands)
    of_parts = [micro_batches(pairs, plan, expands=expands, part=(index, parts)) for index in range(parts)]
    for rows, *own in zip(whole, *of_parts, strict=True):
        for name in ("input_ids_RL", "position_ids_RL", "subtree_end_RL"):
            assert (np.concatenate([getattr(each, name) for each in own]) == getattr(rows, name)).all()
        assert sum(each.tokens_S for each in own).tolist() == rows.tokens_S.tolist()
        assert {each.input_ids_RL.shape[0] * parts for each in own} == {rows.input_ids_RL.shape[0]}


# ---- planned shapes hold every batch of the data with little extra work


some_sizes = st.lists(st.integers(1, 200), min_size=1, max_size=60)


@settings(max_examples=30)
@given(some_sizes, st.integers(1, 9), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.data())
def test_planned_shapes_hold_every_batch(sizes: list[int], pairs: int, shards: int, most: int, data: Any) -> None:
    row_length = data.draw(st.sampled_from([None, 208]))
    given = {"max_shapes": most, "multiple": 8, "attention_crossover_length": 300, "row_length": row_length}
    plan = ShapePlanner(np.array(sizes), pairs, shards, **given).plan()
    assert 1 <= len(plan.shapes) <= most
    assert all(shape.rows % shards == 0 and shape.length % 8 == 0 for shape in plan.shapes)
    assert row_length is None or {shape.length for shape in plan.shapes} == {row_length}
    drawn = data.draw(st.permutations(range(len(sizes))))[:pairs]
    # the worst case: distinct token ids, so pairs share nothing
    rows = [{"chosen_ids": [index + 1] * sizes[index], "rejected_ids": [index + 1]} for index in drawn]
    table = ComparisonRule().table(rows, pairs)
    assert sum((each.tokens_S > 0).sum() for each in pack(sequences_of(rows, 0, table), plan)) == 2 * len(drawn)


@given(st.integers(1, 5000), st.integers(1, 6), st.sampled_from([1, 8, 64, 128]))
def test_bucket_lengths_reach_the_longest_in_few_even_steps(longest: int, most: int, multiple: int) -> None:
    lengths = bucket_lengths(longest, most, multiple)
    assert list(lengths) == sorted(set(lengths))
    assert 1 <= len(lengths) <= most
    assert all(length % multiple == 0 for length in lengths)
    assert longest <= lengths[-1] < longest + multiple
    for shorter, longer in zip(lengths, lengths[1:], strict=False):
        assert longer <= 2 * shorter + multiple  # at most about half of a row is padding


@cache
def made_up() -> list[tuple[list[int], list[int]]]:
    return real_pairs.tokenized(real_pairs.made_up_dialogues())


@pytest.mark.parametrize(("pairs", "shards", "most_tokens"), [(8, 1, 0.72), (64, 8, 0.70)])
def test_packing_computes_few_tokens_per_real_token(pairs: int, shards: int, most_tokens: float) -> None:
    """Hidden size 1,024, at most four shapes. Padding to the longest sequence computes 2.5 tokens per real token."""
    both = made_up()
    sizes = length_stats(dataset_of(both)).lengths.sizes_N
    # the number of micro-batches does not count here
    plan = ShapePlanner(sizes, pairs, shards, attention_crossover_length=6 * 1024, micro_batch_work=128).plan()
    assert len(plan.shapes) <= 4
    columns = real = unpadded = 0
    order = np.random.default_rng(1).permutation(len(both))
    for first in range(0, len(order) - pairs + 1, pairs):
        batch = sequences_of([to_columns({"answers": both[index]}) for index in order[first : first + pairs]], 0)
        columns += sum(packed.input_ids_RL.size for packed in pack(batch, plan))
        unpadded += pack_unpadded(batch, attention_crossover_length=6 * 1024)[0].input_ids_RL.size
        real += sum(len(ids) for ids in batch.ids)
    assert columns / real <= most_tokens
    assert unpadded / real <= 0.64
