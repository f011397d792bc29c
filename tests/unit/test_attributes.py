"""Answers that several attributes grade: their sums, and errors that name bad rows and settings."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenized import prepare
from transformers import LlamaConfig

from trl_tpu import RewardConfig
from trl_tpu.data.comparisons import Labels
from trl_tpu.data.row_formats import Rankings
from trl_tpu.evaluation.judge import judge_rows, sums_on_host
from trl_tpu.modeling.outputs import Outputs, write_outputs
from trl_tpu.report.verdicts import LabeledRewards

A, K = 3, 4
grades = st.one_of(st.none(), st.lists(st.integers(0, 3), min_size=K, max_size=K))
prompts = st.lists(st.lists(grades, min_size=A, max_size=A).filter(any), min_size=1, max_size=3)
NAMES = ("helpful", "brief")


@given(prompts, st.integers(0, 9))
def test_each_attribute_is_a_ranking_and_the_reward_is_the_weighted_sum(some: Any, seed: int) -> None:
    rewards_PAK = torch.randn(len(some), A, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = [0.65, -0.4, 0.5]
    sums = sums_on_host(rewards_PAK, Labels.of([{"grades": each} for each in some], K, A), weights)
    compared = [len(set(values)) > 1 for each in some for values in each if values]
    assert sums.comparisons == sum(compared)
    rewards_PK = np.einsum("a,pak->pk", weights, rewards_PAK.numpy())
    assert (sums.answers, sums.pairs) == (rewards_PK.size, len(some))
    assert (sums.reward, sums.deviations) == pytest.approx((rewards_PK.sum(), rewards_PK.size * rewards_PK.var()))


def test_a_model_of_other_outputs_may_begin_as_one_of_attributes(tmp_path: Path) -> None:
    config = LlamaConfig(num_labels=2, attribute_weights=[0.5, 2.0])
    write_outputs(config, NAMES, None, None)
    config.save_pretrained(tmp_path)
    assert Outputs.saved(tmp_path) == Outputs(dict(zip(NAMES, [0.5, 2.0], strict=True)))
    one = LlamaConfig.from_pretrained(tmp_path, num_labels=1)  # as it is loaded to have one reward
    write_outputs(one, (), None, None)
    assert Outputs.of(one) == Outputs() and one.num_labels == 1


TWO = {"prompt": "a", "completions": ["b", "c"]}


def test_a_row_may_lack_an_attribute() -> None:
    rows = [
        {**TWO, "scores": {"helpful": None, "brief": [1, 2]}},
        {**TWO, "scores": {"helpful": [1, 2], "brief": [3, 3]}},
    ]
    prepared = prepare(rows, rankings=Rankings(attributes=NAMES))
    assert prepared["grades"] == [[None, [1.0, 2.0]], [[1.0, 2.0], [3.0, 3.0]]]


@pytest.mark.parametrize(
    "settings",
    [
        {"attributes": ["helpful"]},
        {"attributes": ["helpful", "helpful"]},
        {"attributes": NAMES, "attribute_weights": [1.0]},
        {"attributes": NAMES, "attribute_weights": [1.0, math.nan]},
        {"attributes": NAMES, "attribute_loss_weights": [1.0, 0.0]},
        {"attribute_weights": [1.0, 1.0]},
    ],
)
def test_bad_settings_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match="attributes="):
        RewardConfig("out", **settings)
    with pytest.raises(ValueError, match="average_over"):
        RewardConfig("out", attributes=list(NAMES), average_over="comparisons")


def test_each_attribute_of_a_scored_row_is_a_ranking() -> None:
    scores, rewards = (
        {"helpful": [1, 2], "brief": [2, 1]},
        [{"helpful": 0.0, "brief": 1.0}, {"helpful": 2.0, "brief": 0.0}],
    )
    row = {"completions": ["a", "b"], "scores": scores, "rewards": [1.0, 0.0], "not_scored": None}
    found = LabeledRewards.of([row | {"rewards_by_attribute": rewards}], ["rewards"])
    verdict = judge_rows(found.rewards_NK, found.labels, groups=found.groups(None))
    assert (verdict.pairs, verdict.kendall_tau) == (2, 1) and verdict.groups.keys() == {"helpful", "brief"}
