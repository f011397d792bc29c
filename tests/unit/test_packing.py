"""A packed row says what its sequences say: who sees whom, at which position, scored where, in planned shapes."""

import os
from typing import Any

import numpy as np
import pytest
from decoders import PAD, drawn_pair, rows_of
from hypothesis import given
from hypothesis import strategies as st

from trl_tpu.packing.batch import Batch
from trl_tpu.packing.pack import pack_unpadded
from trl_tpu.packing.planned import expand_rows, pack
from trl_tpu.packing.shapes import RowPlan, RowShape, plan_rows

batches = st.lists(drawn_pair, min_size=1, max_size=7)
Rows = Batch[np.ndarray]


def pair_size(one: list[int], other: list[int]) -> int:
    return len(one) + len(other) - len(os.path.commonprefix([one, other]))


def here(rows: Rows) -> np.ndarray:
    """Which pairs are in these rows."""
    return rows.tokens_S.reshape(-1, 2)[:, 0] > 0


def micro_batches(pairs: list[Any], plan: RowPlan, size: int | None = None, **kwargs: Any) -> list[Rows]:
    return pack(rows_of(pairs, size), plan, **kwargs)


def packed(pairs: list[Any], shapes: Any = None, size: int | None = None, **kwargs: Any) -> Rows:
    """In one micro-batch; of no shapes that are given, in three rows that each hold half of it, which are enough."""
    sizes = [pair_size(*pair) for pair in pairs]
    shapes = shapes or [RowShape(3, max(*sizes, -(-sum(sizes) // 2)))]
    (batch,) = micro_batches(pairs, RowPlan(tuple(shapes)), size, **kwargs)
    return batch


def unpadded(pairs: list[Any], attention_crossover_length: float = 50) -> Rows:
    return pack_unpadded(rows_of(pairs), attention_crossover_length)[0]


def seen_by(batch: Rows, row: int, column: int) -> np.ndarray:
    """The columns that a token sees, by the definition of ``subtree_end``."""
    return np.flatnonzero((np.arange(len(batch.subtree_end_RL[row])) <= column) & (column < batch.subtree_end_RL[row]))


def read_back(batch: Rows, pair: int, half: int) -> list[int]:
    row, column = batch.score_row_S[2 * pair + half], batch.score_column_S[2 * pair + half]
    return batch.input_ids_RL[row, seen_by(batch, row, column)].tolist()


@pytest.mark.parametrize("layout", [packed, unpadded])
@given(pairs=batches)
def test_every_token_sees_the_path_to_it_at_positions_from_zero(layout: Any, pairs: list[Any]) -> None:
    batch = layout(pairs)
    assert layout is packed or (len(batch.input_ids_RL) == 1 and (batch.input_ids_RL != PAD).all())
    for index, sequences in enumerate(pairs):
        assert [read_back(batch, index, half) for half in (0, 1)] == list(map(list, sequences))
        assert batch.score_row_S[2 * index] == batch.score_row_S[2 * index + 1]
    found = set()
    for row, column in zip(*np.nonzero(batch.input_ids_RL != PAD), strict=True):
        path = seen_by(batch, row, column)
        assert batch.position_ids_RL[row, path].tolist() == list(range(len(path)))
        assert path[-1] == column
        found.add(tuple(batch.input_ids_RL[row, path].tolist()))
    assert found == {tuple(ids[: end + 1]) for pair in pairs for ids in pair for end in range(len(ids))}


@given(batches)
def test_a_row_holds_each_beginning_once_and_then_padding_that_sees_itself(pairs: list[Any]) -> None:
    batch = packed(pairs)
    for row, ids in enumerate(batch.input_ids_RL):
        held = [pair for index, pair in enumerate(pairs) if batch.score_row_S[2 * index] == row]
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
def test_a_sequence_is_scored_at_its_last_token_that_is_not_the_pad_token(ids: list[int], scored: int) -> None:
    batch = packed([(ids, [7, 8, 9])], [RowShape(2, 16)])
    assert read_back(batch, 0, 0) == ids[:scored]
    assert batch.tokens_S.tolist() == [len(ids), 3]


@given(batches, st.integers(0, 3))
def test_a_short_batch_has_the_shapes_of_a_full_one(pairs: list[Any], missing: int) -> None:
    count, size = len(pairs), len(pairs) + missing
    batch = packed(pairs, size=size)
    assert {getattr(batch, name).shape for name in ("score_row_S", "score_column_S", "tokens_S")} == {(2 * size,)}
    assert here(batch).tolist() == [True] * count + [False] * missing
    assert batch.tokens_S.tolist() == [len(ids) for pair in pairs for ids in pair] + [0, 0] * missing
    assert not batch.score_row_S[2 * count :].any() and not batch.score_column_S[2 * count :].any()
    integers = ("input_ids_RL", "position_ids_RL", "subtree_end_RL", "score_row_S", "score_column_S", "tokens_S")
    assert {getattr(batch, name).dtype for name in integers} == {np.dtype(np.int32)}


def test_a_batch_gets_the_first_shape_that_holds_it() -> None:
    shapes = (RowShape(1, 8), RowShape(2, 8), RowShape(2, 16))
    long, short = ([1] * 8, [1] * 8), ([2, 3], [2, 4])
    assert packed([short, short], shapes, 3).input_ids_RL.shape == (1, 8)
    assert packed([short, long], shapes, 3).input_ids_RL.shape == (2, 8)
    assert packed([([1] * 9, [1] * 8)], shapes, 3).input_ids_RL.shape == (2, 16)


def test_what_does_not_fit_is_an_error_that_says_what_and_never_cut() -> None:
    shapes = (RowShape(2, 8),)
    with pytest.raises(ValueError, match="Pair 1 .*9 tokens.* 8"):
        packed([([1], [2]), ([3] * 5, [4] * 4)], shapes)
    with pytest.raises(ValueError, match="3 pairs .*24 tokens.*2 x 8"):
        packed([([1 + index] * 4, [11 + index] * 4) for index in range(3)], shapes)
    prompt = list(range(10, 20))
    pairs = [([*prompt, 1], [*prompt, 2, 3]), ([*prompt, 4], [*prompt, 5])]
    with pytest.raises(ValueError, match="23 tokens.* 22"):
        expand_rows(packed(pairs, [RowShape(1, 22)]))
    assert (expand_rows(packed(pairs, [RowShape(1, 23)])).segment_R2L[0] > 0).sum(axis=-1).tolist() == [22, 23]


def test_a_prompt_that_all_the_data_shares_is_planned_for_once_a_row() -> None:
    sizes = np.full(100, 120)  # 100 of a system prompt, 20 of its own
    apart, shared = (plan_rows(sizes, 8, max_shapes=1, shared_prefix=common).update[0] for common in (0, 100))
    assert apart.rows * apart.length >= 8 * 120
    assert shared.rows * shared.length <= 100 + 8 * 20 + 32
    prompt = [1] * 100
    pairs = [(prompt + [2 + index] * 19, prompt + [100 + index]) for index in range(8)]
    assert packed(pairs, [shared]).input_ids_RL.size == shared.rows * shared.length


def test_trees_grow_where_sharing_saves_more_than_attention_costs() -> None:
    prompt = list(range(10, 40))
    pairs = [(prompt + [1, 2], prompt + [3]), (prompt + [4], prompt + [5]), ([10, 6], [10, 7])]
    assert len(unpadded(pairs, 1e9).trees or ()) == 1  # attention for nothing: whatever is shared is shared
    assert len(unpadded(pairs, 50).trees or ()) > 1  # one token in common is not worth a larger tree
    apart = unpadded([([1] * 9, [2] * 9), ([3] * 9, [4] * 9)]).trees or ()  # nothing to share
    assert [(tree.start, tree.stop, len(tree.tails)) for tree in apart] == [(at, at + 9, 1) for at in (0, 9, 18, 27)]


@given(batches, st.integers(1, 3), st.integers(0, 2))
def test_micro_batches_hold_each_pair_once(pairs: list[Any], rows: int, missing: int) -> None:
    longest = max(pair_size(*pair) for pair in pairs)
    plan = RowPlan((RowShape(rows, longest), RowShape(rows + 1, 8)), (RowShape(rows, longest), RowShape(1, 6)))
    some = micro_batches(pairs, plan, len(pairs) + missing)
    assert [RowShape(*rows.input_ids_RL.shape) in plan.accumulate for rows in some[:-1]] == [True] * (len(some) - 1)
    assert RowShape(*some[-1].input_ids_RL.shape) in plan.update
    assert sum(here(rows).astype(int) for rows in some).tolist() == [1] * len(pairs) + [0] * missing


@given(batches, st.integers(2, 3), st.booleans())
def test_parts_are_the_rows_of_the_whole(pairs: list[Any], parts: int, expands: bool) -> None:
    """All have the same shapes, in which each pair is in one part; rows without room to expand are an error."""
    longest = max(pair_size(*pair) for pair in pairs)
    plan = RowPlan((RowShape(parts, longest), RowShape(2 * parts, 8)), (RowShape(parts, longest),))
    whole = micro_batches(pairs, plan, expands=expands)
    of_parts = [micro_batches(pairs, plan, expands=expands, part=(index, parts)) for index in range(parts)]
    for rows, *own in zip(whole, *of_parts, strict=True):
        for name in ("input_ids_RL", "position_ids_RL", "subtree_end_RL"):
            assert (np.concatenate([getattr(each, name) for each in own]) == getattr(rows, name)).all()
        assert sum(each.tokens_S for each in own).tolist() == rows.tokens_S.tolist()
        assert {each.input_ids_RL.shape[0] * parts for each in own} == {rows.input_ids_RL.shape[0]}
