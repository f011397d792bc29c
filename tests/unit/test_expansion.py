"""Expanded rows hold each dialogue whole, in order and by itself, and every token finds its way back."""

from typing import Any

import numpy as np
import pytest
from decoders import PAD, Pairs, rows_of
from drawn_pairs import pair
from hypothesis import given
from hypothesis import strategies as st

from trl_tpu.packing.pack import pack
from trl_tpu.packing.rows import TokenRows, expand_rows
from trl_tpu.packing.shapes import RowPlan, RowShape

Rows = TokenRows[np.ndarray]
batches = st.lists(pair, min_size=1, max_size=7)


def packed(pairs: Pairs, *shapes: RowShape, size: int | None = None) -> Rows:
    (rows,) = pack(rows_of(pairs), RowPlan(shapes), size or len(pairs), PAD)
    return rows


def roomy(pairs: Pairs) -> tuple[RowShape, ...]:
    """Two rows, or one, into which everything fits whatever is shared."""
    return RowShape(2, max(1, sum(len(ids) for pair in pairs for ids in pair))), RowShape(1, 400)


@given(batches, st.integers(0, 2))
def test_each_dialogue_lies_whole_in_the_row_of_its_half(pairs: list[Any], missing: int) -> None:
    rows = packed(pairs, *roomy(pairs), size=len(pairs) + missing)
    expansion = expand_rows(rows)
    found: dict[tuple[int, int], list[list[int]]] = {}
    for row, half in np.ndindex(expansion.gather_R2L.shape[:2]):
        segment_L, column_L = expansion.segment_R2L[row, half], expansion.gather_R2L[row, half]
        used = int((segment_L > 0).sum())
        assert (segment_L[:used] > 0).all() and (np.diff(segment_L[:used]) >= 0).all()  # each one contiguous
        assert (column_L[:used] >= 0).all() and (column_L[used:] == -1).all()
        for number in np.unique(segment_L[:used]):
            columns = column_L[segment_L == number]
            assert rows.position_ids_RL[row, columns].tolist() == list(range(len(columns)))
            found.setdefault((row, half), []).append(rows.input_ids_RL[row, columns].tolist())
    expected: dict[tuple[int, int], list[list[int]]] = {}
    for index, dialogues in enumerate(pairs):
        for half, ids in enumerate(dialogues):
            expected.setdefault((int(rows.score_row_S[2 * index + half]), half), []).append(list(ids))
    assert found == expected


@given(batches)
def test_every_token_comes_back_from_a_place_it_was_copied_to(pairs: list[Any]) -> None:
    rows = packed(pairs, *roomy(pairs))
    expansion = expand_rows(rows)
    real_RL = rows.input_ids_RL != PAD
    assert ((expansion.inverse_RL >= 0) == real_RL).all()
    for row, column in zip(*np.nonzero(real_RL), strict=True):
        assert expansion.gather_R2L[row].ravel()[expansion.inverse_RL[row, column]] == column
        assert np.flatnonzero(expansion.scatter_R2L[row] == column).tolist() == [expansion.inverse_RL[row, column]]
    assert (expansion.scatter_R2L >= 0).sum() == real_RL.sum()
    assert {array.dtype for array in expansion} == {np.dtype(np.int32)}


def test_rows_too_short_for_their_dialogues_are_an_error() -> None:
    prompt = list(range(10, 20))
    pairs = [([*prompt, 1], [*prompt, 2, 3]), ([*prompt, 4], [*prompt, 5])]
    with pytest.raises(ValueError, match="23 tokens.* 22"):
        expand_rows(packed(pairs, RowShape(1, 22)))
    fits = expand_rows(packed(pairs, RowShape(1, 23)))
    assert (fits.segment_R2L[0] > 0).sum(axis=-1).tolist() == [22, 23]
