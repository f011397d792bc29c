"""Ranked answers, also by several attributes: metrics, prepared rows and settings."""

import tracemalloc
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from preference_rows import prepare
from transformers import LlamaConfig

from trl_tpu.data.collate import ComparisonRule, Labels, sequences_of
from trl_tpu.data.kinds import Pairs, Rankings, answers_of
from trl_tpu.data.length_stats import kind_of_dataset, length_stats
from trl_tpu.evaluation.evaluate import NoComparisons, evaluate_rows, padded, sums_on_host
from trl_tpu.modeling.head_spec import HeadSpec, write_head_spec
from trl_tpu.packing.pack import pack_unpadded
from trl_tpu.report.verdicts import LabeledRewards

K = 5
answers = st.tuples(st.floats(-20, 20, width=32), st.integers(0, 3))  # (reward, grade)
prompts = st.lists(st.lists(answers, min_size=2, max_size=K), min_size=1, max_size=4)


@given(prompts)
def test_metrics_weight_every_prompt_equally(some: Any) -> None:
    rewards_PK, grade_PK = (padded([[each[at] for each in row] for row in some]) for at in (0, 1))
    sums = sums_on_host(torch.from_numpy(rewards_PK)[:, None], labels_of(grade_PK))
    margins = [[r - s for (r, a), (s, b) in permutations(each, 2) if a > b] for each in some]
    margins = [each for each in margins if each]
    assert (sums.pairs, sums.answers, sums.comparisons) == (len(some), sum(map(len, some)), len(margins))
    if not margins:
        return
    verdict = evaluate_rows(rewards_PK, labels_of(grade_PK))
    found, logged = verdict.metrics(), sums.metrics()
    accuracy = np.mean([np.mean(np.array(each) > 0) for each in margins])
    assert logged["accuracy"] == pytest.approx(accuracy) == verdict.accuracy.value
    assert logged["margin"] == pytest.approx(np.mean([np.mean(each) for each in margins])) == verdict.margins.mean
    assert found["brier"] == pytest.approx(np.mean([np.mean((1 / (1 + np.exp(each))) ** 2) for each in margins]))
    assert (verdict.pairs, verdict.accuracy.count) == (sum(map(len, margins)), len(margins))
    assert verdict.ties == sum(margin == 0 for each in margins for margin in each)
    signs = [[np.sign(r - s) * np.sign(a - b) for (r, a), (s, b) in combinations(each, 2) if a != b] for each in some]
    assert found["kendall_tau"] == pytest.approx(np.mean([np.mean(each) for each in signs if each]))
    best = [
        np.mean([grade == max(grade for _, grade in each) for reward, grade in each if reward == max(each)[0]])
        for each, compared in zip(some, signs, strict=True)
        if compared
    ]
    assert found["top1_accuracy"] == pytest.approx(np.mean(best))


def labels_of(grade_NK: np.ndarray) -> Labels:
    return Labels(grade_NK[:, None].astype(np.float32), kind=Rankings())


def test_verdict_memory_grows_with_answers_not_comparisons() -> None:
    chooser = np.random.default_rng(0)
    grade_NK = chooser.permuted(np.tile(np.arange(64.0), (400, 1)), axis=1)
    rewards_NK = grade_NK / 30 + chooser.standard_normal((400, 64))
    tracemalloc.start()
    verdict = evaluate_rows(rewards_NK, labels_of(grade_NK), np.ones((400, 64)))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert verdict.pairs == 400 * 64 * 63 // 2 and most < 0.6 * 80 * verdict.pairs  # bytes
    sums = sums_on_host(torch.from_numpy(rewards_NK)[:, None], labels_of(grade_NK)).metrics()
    assert (verdict.accuracy.value, verdict.margins.mean) == pytest.approx((sums["accuracy"], sums["margin"]))
    margins_M = (rewards_NK[:, :, None] - rewards_NK[:, None])[grade_NK[:, :, None] > grade_NK[:, None]]
    assert verdict.pairwise_loss == pytest.approx(np.logaddexp(0, -margins_M).mean(), rel=0.02)


def test_prompt_is_computed_once_for_all_its_answers() -> None:
    prompts = [[*range(10, 110)], [*range(10, 60), *range(200, 250)]]
    rows = [
        {"answer_ids": [[*prompt, 1000 + answer, 7] for answer in range(count)], "grades": [*range(count)]}
        for prompt, count in zip(prompts, (8, 3), strict=True)
    ]
    batch = sequences_of(rows, 0, ComparisonRule(answers=8, kind=Rankings()).table(rows))
    (packed,) = pack_unpadded(batch, attention_crossover_length=1e6)
    assert packed.input_ids_RL.size == 150 + 2 * 11  # the 50 tokens that both prompts share are held once, too


TWO = {"prompt": "a", "completions": ["b", "c"]}


def test_scores_that_do_not_grade_answers_are_ignored() -> None:
    answered = {"completions": ["a", "b"], "rewards": [1.0, 0.0], "not_scored": None}
    scores: list[Any] = [None, [1.0], {"helpful": 1}, [1.0, 1.0]]
    ignored = [answered | {"scores": each} for each in scores]
    with pytest.raises(NoComparisons):
        verdict_on(ignored)
    assert verdict_on([*ignored, answered | {"ranks": [1, 2]}]).kendall_tau == 1


def verdict_on(rows: list[dict[str, Any]]) -> Any:
    labeled = LabeledRewards()
    labeled.add(rows, ["rewards"])
    return labeled.verdict()


@pytest.mark.parametrize("other", [{"completions": ["b", "c"], "labels": [1, 0]}, {"scores": [1.0, 2.0]}])
def test_pair_with_only_answers_or_only_grades_stays_a_pair(other: dict[str, Any]) -> None:
    assert kind_of_dataset(prepare([{"prompt": "a", "chosen": "b", "rejected": "c"} | other])) == Pairs()


CLOSE: list[dict[str, Any]] = [  # grades that are equal in float32
    {"scores": [1764100000.0, 1764100010.0]},
    {"scores": [1764100010, 1764100000, 1764100010, 1764100020]},
    {"scores": [3e-50, 0.0, 2e-50, 3e-50]},
    {"ranks": [2**24 + 1, 2**24, 2**24 + 2]},
    {"scores": [1.0 + 1e-12, -1.0, 1.0 - 1e-12]},
]


@pytest.mark.parametrize("graded", CLOSE)
def test_grades_are_ordered_in_float64(graded: dict[str, Any]) -> None:
    (values,) = graded.values()
    row = {"prompt": "a", "completions": [*"bcde"[: len(values)]], **graded}
    grade_K = np.array(values, float) * (-1 if "ranks" in graded else 1)
    (prepared,) = prepare([row], kinds=[Rankings(may_tie=True)])
    assert prepared["grades"] == grade_K.tolist()
    table = ComparisonRule(answers=len(values), margin_scale=0.1, kind=Rankings()).table([prepared])
    columns = (table.better_C.tolist(), table.worse_C.tolist(), table.margin_C, table.weight_C)
    compared = {(better, worse): margin for better, worse, margin, weight in zip(*columns, strict=True) if weight}
    margins = {(a, b): 0.1 * (x - y) for (a, x), (b, y) in permutations(enumerate(grade_K), 2) if x > y}
    assert compared == {key: np.float32(margin) for key, margin in margins.items()}
    rounded_K = table.grade_SA[:, 0]  # of listwise losses and evaluations: on the device, so float32
    differences = [np.sign(np.subtract.outer(each_K, each_K)) for each_K in (grade_K, rounded_K)]
    assert rounded_K.dtype == np.float32 and (differences[0] == differences[1]).all()
    assert rounded_K == pytest.approx(grade_K, rel=1e-6, abs=1e-37)
    verdict = verdict_on([row | {"rewards": np.argsort(np.argsort(grade_K)).tolist()}])
    assert (verdict.pairs, verdict.accuracy.value) == (len(margins), 1)


EXTRA: dict[str, Any] = {
    "grades": [4, 2], "grade": "A", "labels": [1], "weight": 2.0, "step": 1, "is_there": True, "end": 3,
    "comparisons_counted": 3, "input_ids": [1, 2], "attention_mask": [1], "answer_ids": ["x", "y"], "rank": 1,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5},
    "tokenized pairs": {"chosen_ids": [1], "rejected_ids": [2], "margin": 0.5},
    "rankings": {**TWO, "scores": [1.0, 2.0]},
    "tokenized rankings": {"answer_ids": [[1], [2]], "grades": [1.0, 2.0]},
    "one chosen, several rejected": {"prompt": "a", "chosen": "b", "rejected": ["c", "b c"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_extra_columns_change_neither_rows_nor_labels(form: str) -> None:
    row = FORMS[form]
    plain, more = prepare([row]), prepare([row | {key: value for key, value in EXTRA.items() if key not in row}])
    rule = ComparisonRule(answers=length_stats(plain).answers, kind=kind_of_dataset(plain))
    for prepared in (more, prepare(more.to_list())):
        assert kind_of_dataset(prepared) == kind_of_dataset(plain)
        assert list(map(answers_of, prepared)) == list(map(answers_of, plain))
        assert str(rule.table(list(prepared))) == str(rule.table(list(plain)))
        assert length_stats(prepared).answers == length_stats(plain).answers
        assert length_stats(prepared).checksum == length_stats(plain).checksum


def test_ranking_formats_are_prepared_and_long_answers_removed() -> None:
    equal = {**TWO, "scores": [1.0, 1.0]}
    assert prepare([equal], kinds=[Rankings(may_tie=True, may_all_tie=True)])["grades"] == [[1.0, 1.0]]
    rows = [{**TWO, "completions": ["b", "c", "d" * 9], "ranks": [2, 1, 2]}, {**TWO, "ranks": [1, 2]}]
    assert prepare(rows, kinds=[Rankings(may_tie=True)])["grades"] == [[-2.0, -1.0, -2.0], [-1.0, -2.0]]
    assert prepare(rows, kinds=[Rankings(may_tie=True)], max_length=4)["grades"] == [[-1.0, -2.0]]
    cut = prepare(rows, kinds=[Rankings(may_tie=True)], max_length=4, truncation_mode="keep_start")["answer_ids"]
    assert [[len(ids) for ids in row] for row in cut] == [[3, 3, 4], [3, 3]]
    chosen = prepare([{"prompt": "a", "chosen": "b", "rejected": ["c", "d"]}])
    assert chosen["grades"] == [[1.0, 0.0, 0.0]] and [len(ids) for ids in chosen["answer_ids"][0]] == [3, 3, 3]


# ---- several attributes

A, NAMES = 3, ("helpful", "brief")
grades = st.one_of(st.none(), st.lists(st.integers(0, 3), min_size=K, max_size=K))
graded = st.lists(st.lists(grades, min_size=A, max_size=A).filter(any), min_size=1, max_size=3)


@given(graded, st.integers(0, 9))
def test_attributes_are_rankings_and_the_reward_is_their_weighted_sum(some: Any, seed: int) -> None:
    rewards_PAK = torch.randn(len(some), A, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = [0.65, -0.4, 0.5]
    sums = sums_on_host(rewards_PAK, Labels.of([{"grades": each} for each in some], Rankings(), K, A), weights)
    compared = [len(set(values)) > 1 for each in some for values in each if values]
    assert sums.comparisons == sum(compared)
    rewards_PK = np.einsum("a,pak->pk", weights, rewards_PAK.numpy())
    assert (sums.answers, sums.pairs) == (rewards_PK.size, len(some))
    assert (sums.reward, sums.deviations) == pytest.approx((rewards_PK.sum(), rewards_PK.size * rewards_PK.var()))


def test_attribute_head_can_start_from_another_number_of_outputs(tmp_path: Path) -> None:
    config = LlamaConfig(num_labels=2, attribute_weights=[0.5, 2.0])
    write_head_spec(config, HeadSpec(dict.fromkeys(NAMES, 1.0)), keeps_weights=True)
    config.save_pretrained(tmp_path)
    assert HeadSpec.saved(tmp_path) == HeadSpec(dict(zip(NAMES, [0.5, 2.0], strict=True)))
    one = LlamaConfig.from_pretrained(tmp_path, num_labels=1)  # loaded as a model with one reward
    write_head_spec(one, HeadSpec())
    assert HeadSpec.of(one) == HeadSpec() and one.num_labels == 1


def test_rows_may_lack_an_attribute() -> None:
    rows = [
        {**TWO, "scores": {"helpful": None, "brief": [1, 2]}},
        {**TWO, "scores": {"helpful": [1, 2], "brief": [3, 3]}},
    ]
    prepared = prepare(rows, kinds=[Rankings(attributes=NAMES)])
    assert prepared["grades"] == [[None, [1.0, 2.0]], [[1.0, 2.0], [3.0, 3.0]]]


def test_each_attribute_of_a_scored_row_is_a_ranking() -> None:
    scores, rewards = (
        {"helpful": [1, 2], "brief": [2, 1]},
        [{"helpful": 0.0, "brief": 1.0}, {"helpful": 2.0, "brief": 0.0}],
    )
    row = {"completions": ["a", "b"], "scores": scores, "rewards": [1.0, 0.0], "not_scored": None}
    verdict = verdict_on([row | {"rewards_by_attribute": rewards}])
    assert (verdict.pairs, verdict.kendall_tau) == (2, 1) and verdict.groups.keys() == {"helpful", "brief"}
