"""A packed row says what its dialogues say: who sees whom, at which position, scored where, in planned shapes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_tpu.packing.pack import pack, pack_unpadded
from trl_tpu.packing.rows import PackedRows
from trl_tpu.packing.schedule import RowPlan
from trl_tpu.packing.shapes import RowShape, plan_shapes, zigzag

PAD = 0
# few ids, so that prefixes are shared by chance; or a common prompt with tails of any length
dialogue = st.lists(st.integers(1, 3), min_size=1, max_size=12)
tail = st.lists(st.integers(1, 9), max_size=6)
free_pair = st.tuples(dialogue, dialogue)
prompted_pair = st.builds(lambda prompt, one, other: (prompt + one, prompt + other), dialogue, tail, tail)
identical_pair = dialogue.map(lambda ids: (ids, ids))
pair = st.one_of(free_pair, prompted_pair, identical_pair)
batches = st.lists(pair, min_size=1, max_size=7)
Rows = PackedRows[np.ndarray]


def pair_size(one: list[int], other: list[int]) -> int:
    common = next((at for at, ids in enumerate(zip(one, other, strict=False)) if ids[0] != ids[1]), None)
    return len(one) + len(other) - (min(len(one), len(other)) if common is None else common)


def micro_batches(pairs: list[Any], plan: RowPlan, size: int | None = None, **kwargs: Any) -> list[Rows]:
    return pack(pairs, plan, size or len(pairs), PAD, **kwargs)


def packed(pairs: list[Any], shapes: Any = None, size: int | None = None, **kwargs: Any) -> Rows:
    """In one micro-batch; of no shapes that are given, in three rows that each hold half of it, which are enough."""
    sizes = [pair_size(*pair) for pair in pairs]
    shapes = shapes or [RowShape(3, max(*sizes, -(-sum(sizes) // 2)))]
    (batch,) = micro_batches(pairs, RowPlan(tuple(shapes)), size, **kwargs)
    return batch


def unpadded(pairs: list[Any], attention_crossover_length: float = 50) -> Rows:
    return pack_unpadded(pairs, PAD, attention_crossover_length=attention_crossover_length)


def tree_count(pairs: list[Any], attention_crossover_length: float) -> int:
    return len(unpadded(pairs, attention_crossover_length).trees or ())


def seen_by(batch: Rows, row: int, column: int) -> np.ndarray:
    """The columns that a token sees, by the definition of ``subtree_end``."""
    return np.flatnonzero((np.arange(len(batch.subtree_end_RL[row])) <= column) & (column < batch.subtree_end_RL[row]))


def read_back(batch: Rows, pair: int, half: int) -> list[int]:
    row, column = batch.last_row_PK[pair, half], batch.last_column_PK[pair, half]
    return batch.input_ids_RL[row, seen_by(batch, row, column)].tolist()


@pytest.mark.parametrize("layout", [packed, unpadded])
@given(pairs=batches)
def test_the_last_token_of_a_dialogue_sees_that_dialogue_and_nothing_else(layout: Any, pairs: list[Any]) -> None:
    batch = layout(pairs)
    for index, dialogues in enumerate(pairs):
        assert [read_back(batch, index, half) for half in (0, 1)] == list(map(list, dialogues))
        assert batch.last_row_PK[index, 0] == batch.last_row_PK[index, 1]


@pytest.mark.parametrize("layout", [packed, unpadded])
@given(pairs=batches)
def test_every_token_sees_the_path_to_it_at_positions_from_zero(layout: Any, pairs: list[Any]) -> None:
    batch = layout(pairs)
    beginnings = {tuple(ids[: end + 1]) for pair in pairs for ids in pair for end in range(len(ids))}
    found = set()
    for row, column in zip(*np.nonzero(batch.input_ids_RL != PAD), strict=True):
        path = seen_by(batch, row, column)
        assert batch.position_ids_RL[row, path].tolist() == list(range(len(path)))
        assert path[-1] == column
        found.add(tuple(batch.input_ids_RL[row, path].tolist()))
    assert found == beginnings


@given(batches)
def test_a_row_holds_each_beginning_once_and_then_padding_that_sees_itself(pairs: list[Any]) -> None:
    batch = packed(pairs)
    for row, ids in enumerate(batch.input_ids_RL):
        here = [pair for index, pair in enumerate(pairs) if batch.last_row_PK[index, 0] == row]
        beginnings = {tuple(ids[: end + 1]) for pair in here for ids in pair for end in range(len(ids))}
        used = len(beginnings)
        assert (ids[:used] != PAD).all() and (ids[used:] == PAD).all()
        assert (batch.subtree_end_RL[row, :used] <= used).all()
        for column in range(used, len(ids)):
            assert seen_by(batch, row, column).tolist() == [column]
            assert batch.position_ids_RL[row, column] == 0


@pytest.mark.parametrize(
    ("ids", "scored"), [([5, 6, PAD], 2), ([5, PAD, 6, PAD, PAD], 3), ([PAD, PAD], 1), ([PAD], 1), ([5, 6], 2)]
)
def test_a_dialogue_is_scored_at_its_last_token_that_is_not_the_pad_token(ids: list[int], scored: int) -> None:
    batch = packed([(ids, [7, 8, 9])], [RowShape(2, 16)])
    assert read_back(batch, 0, 0) == ids[:scored]
    assert batch.tokens_P.tolist() == [len(ids) + 3]


@given(batches, st.integers(0, 3))
def test_a_short_batch_has_the_shapes_of_a_full_one(pairs: list[Any], missing: int) -> None:
    count, size = len(pairs), len(pairs) + missing
    margins = [index - 1.5 for index in range(count)]
    batch = packed(pairs, size=size, labels={"margin": np.array(margins)})
    assert batch.last_row_PK.shape == batch.last_column_PK.shape == (size, 2)
    assert batch.pair_mask_P.tolist() == [True] * count + [False] * missing
    assert batch.labels["margin"].tolist() == margins + [0.0] * missing
    assert batch.tokens_P.tolist() == [len(one) + len(other) for one, other in pairs] + [0] * missing
    assert not batch.last_row_PK[count:].any() and not batch.last_column_PK[count:].any()
    integers = ("input_ids_RL", "position_ids_RL", "subtree_end_RL", "last_row_PK", "last_column_PK", "tokens_P")
    assert {getattr(batch, name).dtype for name in integers} == {np.dtype(np.int32)}
    assert packed(pairs).labels == {}


def test_a_batch_gets_the_first_shape_that_holds_it() -> None:
    shapes = (RowShape(1, 8), RowShape(2, 8), RowShape(2, 16))
    long, short = ([1] * 8, [1] * 8), ([2, 3], [2, 4])
    assert packed([short, short], shapes, 3).input_ids_RL.shape == (1, 8)
    assert packed([short, long], shapes, 3).input_ids_RL.shape == (2, 8)
    assert packed([([1] * 9, [1] * 8)], shapes, 3).input_ids_RL.shape == (2, 16)


def test_what_does_not_fit_is_an_error_that_says_what_and_never_cut() -> None:
    shapes = (RowShape(2, 8),)
    with pytest.raises(ValueError, match="Pair 1 of the batch takes 9 tokens .* longest planned row has 8"):
        packed([([1], [2]), ([3] * 5, [4] * 4)], shapes)
    with pytest.raises(ValueError, match="3 pairs with 24 tokens fits none of the planned shapes 2 x 8"):
        packed([([1 + index] * 4, [11 + index] * 4) for index in range(3)], shapes)
    with pytest.raises(ValueError, match="A batch has at most 2 pairs.* got 3"):
        packed([([1], [2])] * 3, shapes, 2)


sizes = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=30), st.integers(1, 8), st.data())
def test_rows_dealt_the_largest_pairs_hold_any_smaller_ones(sizes: list[int], rows: int, data: st.DataObject) -> None:
    """What makes the last shape hold every batch, whatever best fit does."""
    largest = np.sort(sizes)[::-1]
    smaller = np.sort([data.draw(st.integers(0, int(size))) for size in largest])[::-1]
    dealt = zigzag(len(sizes), rows)
    assert dealt.max() < rows
    assert (np.bincount(dealt, smaller, rows) <= np.bincount(dealt, largest, rows)).all()


def test_a_prompt_that_all_the_data_shares_is_planned_for_once_a_row() -> None:
    sizes = np.full(100, 120)  # 100 of a system prompt, 20 of its own
    apart, shared = (plan_shapes(sizes, 8, max_shapes=1, shared_prefix=common)[0] for common in (0, 100))
    assert apart.rows * apart.length >= 8 * 120
    assert shared.rows * shared.length <= 100 + 8 * 20 + 32
    prompt = [1] * 100
    pairs = [(prompt + [2 + index] * 19, prompt + [100 + index]) for index in range(8)]
    assert packed(pairs, [shared]).input_ids_RL.size == shared.rows * shared.length


@given(batches)
def test_an_unpadded_row_has_no_padding_and_trees_that_see_only_themselves(pairs: list[Any]) -> None:
    batch = unpadded(pairs)
    length = batch.input_ids_RL.shape[1]
    assert batch.trees is not None
    assert batch.input_ids_RL.shape[0] == 1
    assert (batch.input_ids_RL != PAD).all()
    assert length <= sum(len(ids) for pair in pairs for ids in pair)
    assert [tree.start for tree in batch.trees] == [0, *(tree.stop for tree in batch.trees[:-1])]
    assert batch.trees[-1].stop == length
    for tree in batch.trees:
        assert [tail.start for tail in tree.tails] == [0, *(tail.stop for tail in tree.tails[:-1])]
        assert tree.tails[-1].stop == tree.stop - tree.start
        for tail in tree.tails:
            path = [column for start, stop in tail.path for column in range(start, stop)]
            for column in range(tail.start, tail.stop):
                path.append(column)
                assert list(seen_by(batch, 0, tree.start + column)) == [tree.start + each for each in path]


def test_trees_grow_where_sharing_saves_more_than_attention_costs() -> None:
    prompt = list(range(10, 40))
    pairs = [(prompt + [1, 2], prompt + [3]), (prompt + [4], prompt + [5]), ([10, 6], [10, 7])]
    assert tree_count(pairs, 1e9) == 1  # attention for nothing: whatever is shared is shared
    assert tree_count(pairs, 50) > 1  # one token in common is not worth a larger tree
    apart = unpadded([([1] * 9, [2] * 9), ([3] * 9, [4] * 9)]).trees or ()
    assert [(tree.start, tree.stop, len(tree.tails)) for tree in apart] == [
        (0, 9, 1),
        (9, 18, 1),
        (18, 27, 1),
        (27, 36, 1),
    ]  # nothing to share


@given(batches, st.integers(1, 3), st.integers(0, 2))
def test_micro_batches_hold_each_pair_once(pairs: list[Any], rows: int, missing: int) -> None:
    longest = max(pair_size(*pair) for pair in pairs)
    plan = RowPlan((RowShape(rows, longest), RowShape(rows + 1, 8)), (RowShape(rows, longest), RowShape(1, 6)))
    margins = [float(index) for index in range(len(pairs))]
    some = micro_batches(pairs, plan, len(pairs) + missing, labels={"margin": np.array(margins)})
    assert [RowShape(*rows.input_ids_RL.shape) in plan.accumulate for rows in some[:-1]] == [True] * (len(some) - 1)
    assert RowShape(*some[-1].input_ids_RL.shape) in plan.update
    assert sum(rows.pair_mask_P.astype(int) for rows in some).tolist() == [1] * len(pairs) + [0] * missing
    for rows_ in some:
        assert rows_.batch_pairs_1.tolist() == [len(pairs)]
        assert (rows_.tokens_P > 0).tolist() == rows_.pair_mask_P.tolist()
        for index in np.flatnonzero(rows_.pair_mask_P):
            assert [read_back(rows_, index, half) for half in (0, 1)] == list(map(list, pairs[index]))
            assert rows_.labels["margin"][index] == margins[index]


@given(batches, st.integers(2, 3), st.booleans())
def test_parts_are_the_rows_of_the_whole(pairs: list[Any], parts: int, expands: bool) -> None:
    """All have the same shapes, in which each pair is in one part, and a loss whose mean is that of the whole."""
    longest = max(pair_size(*pair) for pair in pairs)
    plan = RowPlan((RowShape(parts, longest), RowShape(2 * parts, 8)), (RowShape(parts, longest),))
    whole = micro_batches(pairs, plan, expands=expands)
    of_parts = [micro_batches(pairs, plan, expands=expands, part=(index, parts)) for index in range(parts)]
    for rows, *own in zip(whole, *of_parts, strict=True):
        for name in ("input_ids_RL", "position_ids_RL", "subtree_end_RL"):
            assert (np.concatenate([getattr(each, name) for each in own]) == getattr(rows, name)).all()
        assert sum(each.pair_mask_P.astype(int) for each in own).tolist() == rows.pair_mask_P.tolist()
        assert sum(each.tokens_P for each in own).tolist() == rows.tokens_P.tolist()
        for each in own:
            assert each.input_ids_RL.shape[0] * parts == rows.input_ids_RL.shape[0]
            assert each.batch_pairs_1 * parts == pytest.approx(rows.batch_pairs_1)
            for index in np.flatnonzero(each.pair_mask_P):
                assert [read_back(each, index, half) for half in (0, 1)] == list(map(list, pairs[index]))


@given(batches, st.integers(1, 3))
def test_rows_that_are_to_be_expanded_have_room_for_either_dialogue_of_every_pair(pairs: list[Any], rows: int) -> None:
    longest = max(pair_size(*pair) for pair in pairs)
    plan = RowPlan((RowShape(rows, longest),), (RowShape(rows, longest),))
    for some in micro_batches(pairs, plan, expands=True):
        lengths_P2 = np.array([[len(ids) for ids in pair] for pair in pairs])
        for row in range(rows):
            here = some.pair_mask_P & (some.last_row_PK[:, 0] == row)
            assert (lengths_P2[here].sum(axis=0) <= longest).all()
        assert some.expansion is not None
