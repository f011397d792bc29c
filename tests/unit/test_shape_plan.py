"""A few planned shapes hold every batch of the data with little extra work."""

import functools

import numpy as np
import pytest
import real_pairs
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from preference_rows import dataset_of, to_columns

from trl_tpu.data.collate import ComparisonRule, sequences_of
from trl_tpu.data.length_stats import length_stats
from trl_tpu.packing.pack import pack, pack_unpadded
from trl_tpu.packing.shapes import bucket_lengths, plan_shapes


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=60),
    st.integers(1, 9),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 5),
    st.data(),
)
def test_planned_shapes_hold_every_batch(
    sizes: list[int], pairs: int, shards: int, most: int, data: st.DataObject
) -> None:
    row_length = data.draw(st.sampled_from([None, 208]))
    given = {"max_shapes": most, "multiple": 8, "attention_crossover_length": 300, "row_length": row_length}
    plan = plan_shapes(np.array(sizes), pairs, shards, **given)
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


@functools.cache
def tokenized(source: str) -> list[tuple[list[int], list[int]]]:
    """Return the tokenized pairs with sequences of at most 1,024 tokens."""
    rows = real_pairs.pairs_from(source)
    tokenizer = tiny.tiny_tokenizer([*rows["chosen"][:400], *rows["rejected"][:400]])
    halves = [tokenizer(list(rows[half]))["input_ids"] for half in ("chosen", "rejected")]
    return [pair for pair in zip(*halves, strict=True) if max(map(len, pair)) <= 1024]


@pytest.mark.parametrize(
    "source", [pytest.param(each, marks=[pytest.mark.long] * (each == "real")) for each in real_pairs.SOURCES]
)
@pytest.mark.parametrize(("pairs", "shards", "most_tokens"), [(8, 1, 0.72), (64, 8, 0.70)])
def test_packing_computes_few_tokens_per_real_token(source: str, pairs: int, shards: int, most_tokens: float) -> None:
    """Hidden size 1,024, at most four shapes. Padding to the longest sequence computes 2.5 tokens per real token."""
    both = tokenized(source)
    sizes = length_stats(dataset_of(both)).lengths.sizes_P
    plan = plan_shapes(sizes, pairs, shards, attention_crossover_length=6 * 1024)
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
