"""Length statistics for packing equal plain loops over the pairs."""

import os
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Features, Sequence, Value, concatenate_datasets
from hypothesis import given
from hypothesis import strategies as st
from preference_rows import dataset_of

from trl_tpu.data.kinds import Pairs, answers_of, labels_of
from trl_tpu.data.kinds.solutions import NO_LABEL
from trl_tpu.data.length_stats import LengthStats, length_stats, length_stats_of, rows_of

ids = st.lists(st.integers(1, 2), max_size=9)  # few ids, so that sequences share prefixes by chance
pairs = st.tuples(ids, ids) | ids.map(lambda one: (one, one))


def shared(one: list[int], other: list[int]) -> int:
    return len(os.path.commonprefix([one, other]))


def size(one: list[int], other: list[int]) -> int:
    return len(one) + len(other) - shared(one, other)


FORMS: dict[str, Any] = {
    "pairs": st.fixed_dictionaries({"chosen_ids": ids, "rejected_ids": ids, "margin": st.floats(-9, 9)}),
    "rankings": st.fixed_dictionaries(
        {"answer_ids": st.lists(ids, max_size=3), "grades": st.lists(st.floats(-9, 9), max_size=3)}
    ),
    "solutions": st.lists(st.tuples(st.integers(1, 9), st.sampled_from([NO_LABEL, 0, 1])), max_size=9).map(
        lambda tokens: {"input_ids": [each for each, _ in tokens], "labels": [label for _, label in tokens]}
    ),
}


@given(st.sampled_from([*FORMS]), st.data())
def test_lists_of_any_lengths_are_read_like_rows(form: str, data: st.DataObject) -> None:
    rows = data.draw(st.lists(FORMS[form], min_size=1, max_size=4))
    floats, numbers = Sequence(Value("float64")), Sequence(Value("int64"))
    kinds: Any = {"margin": Value("float64"), "grades": floats, "answer_ids": Sequence(numbers)}
    dataset = Dataset.from_list(rows, Features({name: kinds.get(name, numbers) for name in rows[0]}))
    for found, expected in zip(rows_of(dataset), rows, strict=True):
        assert [ids.tolist() for ids in answers_of(found)] == answers_of(expected)
        assert labels_of(found) == labels_of(expected)


def test_pairs_are_measured_once() -> None:
    pairs = [([1, 2, 3], [1, 2, 4, 5]), ([1], [1]), ([6, 1], [7])]
    dataset = dataset_of(pairs * 500)  # large enough to be read in two parts
    measured = length_stats(dataset)
    found = np.column_stack([measured.lengths.prefix_N, measured.lengths.tails_NK])
    assert found.tolist() == [[2, 1, 2], [1, 0, 0], [0, 2, 1]] * 500
    assert measured.lengths.longest_N.tolist() == [4, 1, 2] * 500
    assert length_stats(dataset) is measured
    assert len(length_stats(dataset.select([])).lengths) == 0
    with pytest.raises(ValueError, match="other"):
        length_stats(dataset.rename_column("chosen_ids", "other"))


some = st.lists(pairs, min_size=1, max_size=4)


@given(st.lists(st.integers(1, 2), max_size=5), st.lists(some, min_size=1, max_size=4))
def test_stats_of_several_tables_equal_those_of_one(prompt: list[int], parts: list[Any]) -> None:
    parts = [[(prompt + one, prompt + other) for one, other in part] for part in parts]

    def measured(parts: list[Any]) -> LengthStats:
        rows = [[dict(zip(Pairs.columns, map(np.array, pair), strict=True)) for pair in part] for part in parts]
        return length_stats_of(rows)

    every = [pair for part in parts for pair in part]
    in_parts, at_once = measured(parts), measured([every])
    common = min(shared(every[0][0], ids) for pair in every for ids in pair)
    assert in_parts.shared_prefix == at_once.shared_prefix == common
    assert in_parts.checksum == at_once.checksum
    assert in_parts.lengths.sizes_N.tolist() == [size(*pair) for pair in every]
    changed = [*every[:-1], (every[-1][0], [*every[-1][1], 3])]
    assert measured([changed]).checksum != at_once.checksum


def test_checksum_depends_on_margins_and_their_order() -> None:
    rows = [([1], [2])] * 1500
    margins = [float(index) for index in range(1500)]
    datasets = [dataset_of(rows, margin=order) for order in (margins, margins[::-1], margins)]
    sums = [length_stats(each).checksum for each in (*datasets, dataset_of(rows))]
    assert sums[0] == sums[2] and len(set(sums)) == 3


@pytest.mark.parametrize("change", ["whole", "shuffled", "some", "shards", "filtered"])
def test_only_selected_rows_of_the_dataset_are_measured(change: str) -> None:
    """A selection keeps the arrow table and adds indices. Concatenated shards have many chunks."""
    generator = np.random.default_rng(0)
    lengths = [(20 + index, 20 + index % 7) for index in range(60)]
    rows = [[[1] * 4 + generator.integers(1, 4, length).tolist() for length in both] for both in lengths]
    dataset: Any = dataset_of(rows)
    dataset = {
        "whole": lambda: dataset,
        "shuffled": lambda: dataset.shuffle(seed=0),
        "some": lambda: dataset.select(range(40, 9, -3)),
        "shards": lambda: concatenate_datasets([dataset.select(range(start, start + 20)) for start in (0, 20, 40)]),
        "filtered": lambda: dataset.filter(lambda row: len(row["chosen_ids"]) % 2 == 0),
    }[change]()
    sizes = [size(row["chosen_ids"], row["rejected_ids"]) for row in dataset]
    common = min(shared(dataset[0]["chosen_ids"], ids) for row in dataset for ids in row.values())
    assert common >= 4
    assert (length_stats(dataset).lengths.sizes_N.tolist(), length_stats(dataset).shared_prefix) == (sizes, common)
