"""What packing measures of a dataset equals plain loops over its pairs, however arrow stores them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, concatenate_datasets
from hypothesis import given
from hypothesis import strategies as st

from trl_tpu import RewardConfig
from trl_tpu.batching.planned_shapes import plan_rows_of
from trl_tpu.data.measure import Measured, measure, measure_tables
from trl_tpu.packing.schedule import plan_rows

ids = st.lists(st.integers(1, 2), max_size=9)  # few ids, so that beginnings are shared by chance
pairs = st.tuples(ids, ids) | ids.map(lambda one: (one, one))
TYPES = [pa.list_(pa.int64()), pa.list_(pa.int32()), pa.large_list(pa.int64())]


def shared(one: list[int], other: list[int]) -> int:
    at = 0
    while at < min(len(one), len(other)) and one[at] == other[at]:
        at += 1
    return at


def size(one: list[int], other: list[int]) -> int:
    return len(one) + len(other) - shared(one, other)


def chunked(parts: list[list[list[int]]], kind: pa.DataType, before: int, after: int) -> pa.ChunkedArray:
    """One chunk for each part, each a slice of a longer array, as a dataset's shards and selections are."""
    arrays = [pa.array([[7] * 3] * before + part + [[8]] * after, kind).slice(before, len(part)) for part in parts]
    return pa.chunked_array(arrays, kind)


@given(st.lists(st.lists(pairs, max_size=4), min_size=1, max_size=4), st.sampled_from(TYPES), *[st.integers(0, 2)] * 4)
def test_pair_sizes_equal_a_loop_over_sliced_chunks(
    parts: list[list[Any]], kind: pa.DataType, before: int, after: int, before_too: int, after_too: int
) -> None:
    chosen = chunked([[one for one, _ in part] for part in parts], kind, before, after)
    rejected = chunked([[other for _, other in part] for part in parts], kind, before_too, after_too)
    assert measure_tables([pa.table({"a": chosen, "b": rejected})], ("a", "b")).sizes_N.tolist() == [
        size(*pair) for part in parts for pair in part
    ]


@pytest.mark.parametrize("columns", [("chosen_ids", "rejected_ids"), ("input_ids_chosen", "input_ids_rejected")])
def test_pairs_are_measured_once_in_the_columns_of_either_api(columns: tuple[str, str]) -> None:
    pairs = [([1, 2, 3], [1, 2, 4, 5]), ([1], [1]), ([6, 1], [7])]
    dataset = Dataset.from_list([dict(zip(columns, pair, strict=True)) for pair in pairs] * 500)  # read in two parts
    measured = measure(dataset)
    lengths = measured.lengths
    found = np.column_stack([lengths.prefix_P, lengths.tails_PK])
    assert found.tolist() == [[2, 1, 2], [1, 0, 0], [0, 2, 1]] * 500
    dialogues_N2 = measured.lengths.prefix_P[:, None] + measured.lengths.tails_PK
    assert dialogues_N2.tolist() == [[3, 4], [1, 1], [2, 1]] * 500
    assert measured.longest_N.tolist() == [4, 1, 2] * 500
    assert measure(dataset) is measured
    assert len(measure(dataset.select([])).lengths) == 0
    with pytest.raises(ValueError, match="no pairs of token ids in the columns"):
        measure(dataset.rename_column(columns[0], "other"))


@given(
    st.lists(st.integers(1, 2), max_size=5),
    st.lists(st.lists(st.tuples(ids, ids), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from(TYPES),
    st.integers(0, 2),
)
def test_what_all_dialogues_share_and_the_checksum_do_not_depend_on_how_arrow_stores_them(
    prompt: list[int], parts: list[list[tuple[list[int], list[int]]]], kind: pa.DataType, before: int
) -> None:
    parts = [[(prompt + one, prompt + other) for one, other in part] for part in parts]

    def measured(parts: list[Any], kind: pa.DataType) -> Measured:
        halves = [[[pair[half] for pair in part] for part in parts] for half in (0, 1)]
        tables = [
            pa.table({"a": chunked([a], kind, before, 1), "b": chunked([b], kind, 0, 1)})
            for a, b in zip(*halves, strict=True)
        ]
        return measure_tables(tables, ("a", "b"))

    every = [one for part in parts for pair in part for one in pair]
    in_parts, at_once = measured(parts, kind), measured([[pair for part in parts for pair in part]], TYPES[0])
    assert in_parts.shared_prefix == at_once.shared_prefix == min(shared(every[0], other) for other in every)
    assert in_parts.checksum == at_once.checksum
    changed = [*parts[:-1], [*parts[-1][:-1], (parts[-1][-1][0], [*parts[-1][-1][1], 3])]]
    assert measured(changed, kind).checksum != at_once.checksum


def test_the_checksum_knows_margins_and_their_order() -> None:
    rows = {"chosen_ids": [[1]] * 1500, "rejected_ids": [[2]] * 1500}
    margins = [float(index) for index in range(1500)]
    datasets = [Dataset.from_dict(rows | {"margin": order}) for order in (margins, margins[::-1], margins)]
    sums = [measure(each).checksum for each in (*datasets, Dataset.from_dict(rows))]
    assert sums[0] == sums[2] and len(set(sums)) == 3


@pytest.mark.parametrize("change", ["whole", "shuffled", "some", "shards", "filtered"])
def test_rows_are_planned_for_the_pairs_of_the_dataset_and_no_others(change: str, tmp_path: Path) -> None:
    """A selection keeps the arrow table and adds indices; joined shards are many chunks."""
    generator = np.random.default_rng(0)
    lengths = [(20 + index, 20 + index % 7) for index in range(60)]
    rows = [
        {
            f"{half}_ids": [1] * 4 + generator.integers(1, 4, length).tolist()
            for half, length in zip(("chosen", "rejected"), both, strict=True)
        }
        for both in lengths
    ]
    dataset: Any = Dataset.from_list(rows)
    dataset = {
        "whole": lambda: dataset,
        "shuffled": lambda: dataset.shuffle(seed=0),
        "some": lambda: dataset.select(range(40, 9, -3)),
        "shards": lambda: concatenate_datasets([dataset.select(range(start, start + 20)) for start in (0, 20, 40)]),
        "filtered": lambda: dataset.filter(lambda row: len(row["chosen_ids"]) % 2 == 0),
    }[change]()
    sizes = np.array([size(row["chosen_ids"], row["rejected_ids"]) for row in dataset])
    dialogues = [row[name] for row in dataset for name in ("chosen_ids", "rejected_ids")]
    common = min(shared(dialogues[0], other) for other in dialogues)
    assert common >= 4
    args = RewardConfig(str(tmp_path), max_shapes=3, report_to="none")
    planned = plan_rows_of(dataset, 16, 4, 2, args)
    assert planned == plan_rows(sizes, 4, 2, max_shapes=3, shared_prefix=common, attention_crossover_length=96)
    with pytest.raises(ValueError, match=f"row_length=8 is too short: the largest pair takes {sizes.max()} tokens"):
        plan_rows_of(dataset, 16, 4, 2, RewardConfig(str(tmp_path), row_length=8, report_to="none"))
