"""Batches equal TRL's, keep a pair's two dialogues together, and mean the same rewards in every layout."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, tiny_tokenizer
from trl.trainer.reward_trainer import DataCollatorForPreference as TrlCollator

from trl_tpu.data.collators import (
    DataCollatorForPreference,
    PadToLengths,
    PairRows,
    RewardDataCollatorWithPadding,
    bucket_lengths,
)
from trl_tpu.modeling.rewards import PairBatch

PAD = 0
ids = st.lists(st.integers(1, 99), min_size=1, max_size=20)
examples = st.lists(
    st.fixed_dictionaries({"chosen_ids": ids, "rejected_ids": ids, "margin": st.floats(-9, 9, width=32)}),
    min_size=1,
    max_size=6,
)


def without_margin(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "margin"} for row in rows]


def in_old_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **{f"input_ids_{half}": row[f"{half}_ids"] for half in ("chosen", "rejected")},
            **{f"attention_mask_{half}": [1] * len(row[f"{half}_ids"]) for half in ("chosen", "rejected")},
            "margin": row["margin"],
        }
        for row in rows
    ]


@settings(deadline=None)
@given(examples, st.sampled_from([None, 1, 7, 8]), st.integers(0, 5), st.booleans())
def test_the_collator_gives_trls_batch(
    rows: list[dict[str, Any]], multiple: int | None, pad_token_id: int, has_margin: bool
) -> None:
    rows = rows if has_margin else without_margin(rows)
    ours, theirs = (
        collator(pad_token_id, pad_to_multiple_of=multiple)(rows)
        for collator in (DataCollatorForPreference, TrlCollator)
    )
    assert list(ours) == list(theirs)
    for key in theirs:
        assert ours[key].dtype == theirs[key].dtype
        assert torch.equal(ours[key], theirs[key])


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 6), st.sampled_from([1, 8, 64, 128]))
def test_bucket_lengths_cover_the_longest_in_few_even_steps(longest: int, most: int, multiple: int) -> None:
    lengths = bucket_lengths(longest, most, multiple)
    assert list(lengths) == sorted(set(lengths))
    assert 1 <= len(lengths) <= most
    assert all(length % multiple == 0 for length in lengths)
    assert longest <= lengths[-1] < longest + multiple
    for shorter, longer in zip(lengths, lengths[1:], strict=False):
        assert longer <= 2 * shorter + multiple  # at most about half of a row is padding


@settings(deadline=None)
@given(examples, st.booleans())
def test_padding_to_lengths_takes_the_shortest_that_fits_and_only_pads(rows: list[dict[str, Any]], old: bool) -> None:
    lengths = (4, 8, 16)
    collate: Any = DataCollatorForPreference(PAD)
    if old:
        rows, collate = in_old_columns(rows), RewardDataCollatorWithPadding(left_padding_tokenizer())
    side = "left" if old else "right"
    before, after = collate(rows), PadToLengths(collate, lengths, PAD, side)(rows)
    keys = [key for key in before if key.startswith(("input_ids", "attention_mask"))]
    longest = max(before[key].shape[1] for key in keys)
    expected = min((length for length in lengths if length >= longest), default=longest)
    for key in keys:
        assert after[key].shape == (before[key].shape[0], expected)
        added = expected - before[key].shape[1]
        text, padding = (
            (after[key][:, added:], after[key][:, :added]) if old else after[key].split([expected - added, added], 1)
        )
        assert torch.equal(text, before[key])
        assert (padding == (PAD if "ids" in key else 0)).all()
    assert {key for key in after if key not in keys} == {key for key in before if key not in keys}
    assert torch.equal(after["margin"], before["margin"]) if "margin" in before else "margin" not in after


def left_padding_tokenizer() -> Any:
    tokenizer = tiny_tokenizer(["text"], vocab_size=258)
    tokenizer.padding_side = "left"
    assert tokenizer.pad_token_id == PAD
    return tokenizer


TEXTS = ["one", "two three", "four five six seven", "eight nine ten eleven twelve thirteen", "a b c"]


@pytest.fixture(scope="module")
def reward_model() -> tuple[Any, Any]:
    tokenizer = tiny_tokenizer(TEXTS, vocab_size=300)
    return tiny_model(tokenizer).eval(), tokenizer


@pytest.fixture(scope="module")
def pairs(reward_model: tuple[Any, Any]) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """Five pairs, and their rewards [5, 2] from each dialogue on its own, without any padding."""
    model, tokenizer = reward_model
    tokens = [tokenizer(text)["input_ids"] for text in TEXTS]
    rows = [
        {"chosen_ids": tokens[index], "rejected_ids": tokens[(index + 2) % 5], "margin": float(index)}
        for index in range(5)
    ]
    with torch.no_grad():
        alone = [
            [model(torch.tensor([row[key]])).logits.item() for key in ("chosen_ids", "rejected_ids")] for row in rows
        ]
    return rows, torch.tensor(alone)


def read_and_score(model: Any, batch: dict[str, Any], side: str) -> tuple[PairBatch, torch.Tensor]:
    read = PairBatch.read(batch, PAD, side)
    with torch.no_grad():
        return read, read.by_pair(model(read.input_ids_RL, attention_mask=read.attention_mask_RL).logits)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "layout", ["preference", "old", "pair rows", "pair rows of old", "short pair rows", "lengths"]
)
def test_rewards_by_pair_are_the_same_in_every_layout(
    layout: str, side: str, reward_model: tuple[Any, Any], pairs: tuple[list[dict[str, Any]], torch.Tensor]
) -> None:
    model, tokenizer = reward_model
    rows, alone = pairs
    tokenizer.padding_side = side
    old = RewardDataCollatorWithPadding(tokenizer)
    new = DataCollatorForPreference(PAD)
    if "old" not in layout:
        side = "right"  # today's collator pads on the right, whatever the tokenizer says
    collate: Any = {
        "preference": new,
        "old": old,
        "pair rows": PairRows(new, 5, PAD),
        "pair rows of old": PairRows(PadToLengths(old, (32, 64), PAD, side), 5, PAD, side),
        "short pair rows": PairRows(new, 8, PAD),
        "lengths": PadToLengths(new, (32, 64), PAD),
    }[layout]
    batch, rewards = read_and_score(model, collate(in_old_columns(rows) if "old" in layout else rows), side)
    assert batch.interleaved == ("pair rows" in layout)
    torch.testing.assert_close(rewards[:5], alone, atol=1e-5, rtol=1e-5)
    assert batch.labels["margin"][:5].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert batch.tokens.dtype == torch.int32
    assert batch.tokens.item() == sum(len(row[key]) for row in rows for key in ("chosen_ids", "rejected_ids"))
    if layout == "short pair rows":
        assert batch.mask_P.tolist() == [True] * 5 + [False] * 3


@settings(max_examples=20, deadline=None)
@given(examples)
def test_old_margins_of_one_number_in_a_list_stay_one_a_pair(rows: list[dict[str, Any]]) -> None:
    listed = [{**row, "margin": [row["margin"]]} for row in in_old_columns(rows)]
    batch = RewardDataCollatorWithPadding(left_padding_tokenizer())(listed)
    assert batch["margin"].tolist() == [row["margin"] for row in rows]


def test_the_old_collator_names_a_missing_column() -> None:
    row = in_old_columns([{"chosen_ids": [1], "rejected_ids": [2], "margin": 0.0}])[0]
    del row["attention_mask_rejected"]
    with pytest.raises(ValueError, match="attention_mask_rejected is missing; found input_ids_chosen"):
        RewardDataCollatorWithPadding(left_padding_tokenizer())([row])
