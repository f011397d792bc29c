"""Ranked answers: losses and gradients are their papers' formulas in float64, and rows say what is wrong with them."""

import math
import tracemalloc
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from trl_tpu.data.judgements import Rankings, labels_of, weights_of
from trl_tpu.data.measure import id_columns, measure, most_answers
from trl_tpu.data.tokenize import prepare_preference_dataset
from trl_tpu.errors import UserError
from trl_tpu.evaluation.ranking import judge_rankings
from trl_tpu.evaluation.reward_sums import sums_on_host
from trl_tpu.modeling.losses import Loss
from trl_tpu.packing.pack import pack_unpadded
from trl_tpu.scoring.summary import Summary

K = 5
answers = st.tuples(st.floats(-20, 20, width=32), st.integers(0, 3))  # reward, grade
prompts = st.lists(st.lists(answers, min_size=2, max_size=K), min_size=1, max_size=4)


def tensors_of(some: list[list[tuple[float, int]]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    labels = labels_of([{"grades": [grade for _, grade in each]} for each in some], K)
    rewards_PK = torch.full((len(some), K), 7.5)  # of answers that are not there
    for rewards_K, each in zip(rewards_PK, some, strict=True):
        rewards_K[: len(each)] = torch.tensor([reward for reward, _ in each])
    return rewards_PK.requires_grad_(), {name: torch.from_numpy(values) for name, values in labels.items()}


def instruct_gpt(each: list[tuple[float, int]], scale: float, smoothing: float, center: float) -> float:
    """https://arxiv.org/abs/2203.02155, eq. 1, with Llama 2's margins: the mean over a prompt's comparisons."""
    losses = [
        (1 - smoothing) * np.logaddexp(0, -d) + smoothing * np.logaddexp(0, d) + center * (r + s) ** 2
        for (r, a), (s, b) in permutations(each, 2)
        if a > b
        for d in [r - s - scale * (a - b)]
    ]
    return float(np.mean(losses)) if losses else 0.0


def plackett_luce(each: list[tuple[float, int]], top_k: int) -> float:
    """Draw the best of those that are left, by the softmax of their rewards."""
    left, total = sorted(each, key=lambda one: -one[1]), 0.0
    for _ in range(min(top_k, len(left))):
        total += float(np.logaddexp.reduce([reward for reward, _ in left]) - left[0][0])
        left = left[1:]
    return total


@pytest.mark.parametrize("loss_type", ["sigmoid", "plackett_luce"])
def test_answers_of_one_grade_are_not_compared(loss_type: str) -> None:
    labels = {name: torch.from_numpy(each) for name, each in labels_of([{"grades": [1, 0, 0]}], 3).items()}
    rewards_PK = torch.tensor([[0.3, 2.0, -1.0]], requires_grad=True)
    Loss(loss_type=loss_type).losses_of(rewards_PK, labels).sum().backward()
    wrong = np.exp(rewards_PK[0].detach().double() - 0.3)
    by_pairs = wrong[1:] / (1 + wrong[1:]) / 2
    expected = by_pairs if loss_type == "sigmoid" else wrong[1:] / wrong.sum()
    assert rewards_PK.grad is not None
    assert rewards_PK.grad[0].tolist() == pytest.approx([-float(expected.sum()), *expected.tolist()], abs=1e-6)


def slopes(formula: Any, each: list[tuple[float, int]]) -> list[float]:
    """Differentiate a formula by each reward, in float64."""
    step = 1e-6
    moved = lambda n, by: [(r + by * (n == i), g) for i, (r, g) in enumerate(each)]  # noqa: E731
    return [(formula(moved(n, step)) - formula(moved(n, -step))) / (2 * step) for n in range(len(each))]


@given(prompts, st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, 0.2]), st.sampled_from([0.0, 0.01]))
def test_all_comparisons_of_a_prompt_are_its_one_loss(
    some: Any, scale: float, smoothing: float, center: float
) -> None:
    rewards_PK, labels = tensors_of(some)
    loss = Loss(margin_scale=scale or None, label_smoothing=smoothing, center_rewards_coefficient=center or None)
    losses_P = loss.losses_of(rewards_PK, labels)
    losses_P.sum().backward()
    for loss_of_one, gradient_K, each in zip(losses_P.tolist(), rewards_PK.grad.tolist(), some, strict=True):  # type: ignore[union-attr]
        assert loss_of_one == pytest.approx(instruct_gpt(each, scale, smoothing, center), rel=1e-5, abs=1e-5)
        expected = slopes(lambda moved: instruct_gpt(moved, scale, smoothing, center), each)
        assert gradient_K == pytest.approx(expected + [0.0] * (K - len(each)), rel=1e-4, abs=1e-4)


@given(prompts, st.sampled_from([None, 1, 2]))
def test_an_order_is_drawn_answer_by_answer(some: Any, top_k: int | None) -> None:
    ordered = [[(reward, -place) for place, (reward, _) in enumerate(each)] for each in some]
    rewards_PK, labels = tensors_of(ordered)
    losses_P = Loss(loss_type="plackett_luce", ranking_top_k=top_k).losses_of(rewards_PK, labels)
    losses_P.sum().backward()
    for loss_of_one, gradient_K, each in zip(losses_P.tolist(), rewards_PK.grad.tolist(), ordered, strict=True):  # type: ignore[union-attr]
        assert loss_of_one == pytest.approx(plackett_luce(each, top_k or K), rel=1e-5, abs=1e-5)
        expected = slopes(lambda moved: plackett_luce(moved, top_k or K), each)
        assert gradient_K == pytest.approx(expected + [0.0] * (K - len(each)), rel=1e-4, abs=1e-4)


def with_ties(each: list[tuple[float, int]], model: str, threshold: float) -> float:
    """Rao and Kupper 1967, theta = exp(threshold); Davidson 1970, nu = threshold; both of strengths exp(reward)."""
    likely = []
    for (r, a), (s, b) in combinations(each, 2):
        one, other = (np.exp(x, dtype=np.float64) for x in ((r, s) if a >= b else (s, r)))
        if model == "davidson":
            tied = threshold * np.sqrt(one * other)
            likely.append((tied if a == b else one) / (one + other + tied))
        else:
            theta = np.exp(threshold)
            won, lost = one / (one + theta * other), other / (theta * one + other)
            product = (theta**2 - 1) * one * other / ((one + theta * other) * (theta * one + other))
            assert won + lost + product == pytest.approx(1)
            likely.append(product if a == b else won)
    return float(np.mean([-np.log(each) for each in likely]))


@given(prompts, st.sampled_from(["davidson", "rao_kupper"]), st.sampled_from([0.3, 1.0]))
def test_ties_are_learned_from(some: Any, model: str, threshold: float) -> None:
    rewards_PK, labels = tensors_of(some)
    losses_P = Loss(ties=model, tie_threshold=threshold).losses_of(rewards_PK, labels)
    losses_P.sum().backward()
    for loss_of_one, gradient_K, each in zip(losses_P.tolist(), rewards_PK.grad.tolist(), some, strict=True):  # type: ignore[union-attr]
        assert loss_of_one == pytest.approx(with_ties(each, model, threshold), rel=1e-5, abs=1e-5)
        expected = slopes(lambda moved: with_ties(moved, model, threshold), each)
        assert gradient_K == pytest.approx(expected + [0.0] * (K - len(each)), rel=1e-4, abs=1e-4)


def test_rewards_may_be_fitted_to_scores() -> None:
    rewards_PK, labels = tensors_of([[(0.5, 3), (-1.0, 0), (2.0, 2)], [(1.0, 1), (4.0, 1)]])
    losses_P = Loss(loss_type="regression").losses_of(rewards_PK, labels)
    assert losses_P.tolist() == pytest.approx([(2.5**2 + 1 + 0) / 3, 4.5])
    losses_P.sum().backward()
    expected = [[-5 / 3, -2 / 3, 0, 0, 0], [0, 3, 0, 0, 0]]
    torch.testing.assert_close(rewards_PK.grad, torch.tensor(expected))


@pytest.mark.parametrize("settings", [{}, {"loss_type": "plackett_luce"}, {"label_smoothing": 0.1}])
def test_two_answers_are_a_pair(settings: Any) -> None:
    rewards_P2 = torch.tensor([[1.0, -0.5], [0.2, 3.0]])
    loss = Loss(center_rewards_coefficient=0.1, **settings)
    ranked = {name: torch.from_numpy(each) for name, each in labels_of([{"grades": [2, 1]}] * 2, 2).items()}
    torch.testing.assert_close(loss.losses_of(rewards_P2, ranked), loss.losses_of(rewards_P2, {}))


@given(st.floats(-20, 20, width=32), st.floats(0, 1, width=32), st.sampled_from([0.0, 0.2]))
def test_a_pair_may_say_how_likely_it_is_right(difference: float, probability: float, smoothing: float) -> None:
    rewards_P2 = torch.tensor([[difference, 0.0]])
    labels = {"chosen_probability": torch.tensor([probability])}
    found = Loss(label_smoothing=smoothing).losses_of(rewards_P2, labels).item()
    target = probability * (1 - smoothing) + (1 - probability) * smoothing
    expected = target * np.logaddexp(0, -difference) + (1 - target) * np.logaddexp(0, difference)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(prompts)
def test_the_comparisons_of_a_prompt_together_count_once_in_all_metrics(some: Any) -> None:
    rewards_PK, labels = tensors_of(some)
    sums = sums_on_host(rewards_PK.detach(), labels)
    margins = [[r - s for (r, a), (s, b) in permutations(each, 2) if a > b] for each in some]
    margins = [each for each in margins if each]
    assert (sums.pairs, sums.answers, sums.comparisons) == (len(some), sum(map(len, some)), len(margins))
    if not margins:
        return
    verdict = judge_rankings(rewards_PK.detach().double().numpy(), *(label.numpy() for label in labels.values()))
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


def test_the_verdict_on_many_answers_takes_memory_for_the_answers_and_not_for_their_comparisons() -> None:
    chooser = np.random.default_rng(0)
    grade_NK = chooser.permuted(np.tile(np.arange(64.0), (400, 1)), axis=1)
    rewards_NK = grade_NK / 30 + chooser.standard_normal((400, 64))
    is_there_NK = np.ones(grade_NK.shape, dtype=bool)
    labels = {"grade": torch.from_numpy(grade_NK), "is_there": torch.from_numpy(is_there_NK)}
    tracemalloc.start()
    verdict = judge_rankings(rewards_NK, grade_NK, is_there_NK, lengths_NK=np.ones((400, 64)))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert verdict.pairs == 400 * 64 * 63 // 2 and most < 0.6 * 80 * verdict.pairs  # bytes
    sums = sums_on_host(torch.from_numpy(rewards_NK), labels).metrics()
    assert (verdict.accuracy.value, verdict.margins.mean) == pytest.approx((sums["accuracy"], sums["margin"]))
    margins_M = (rewards_NK[:, :, None] - rewards_NK[:, None])[grade_NK[:, :, None] > grade_NK[:, None]]
    assert verdict.loss == pytest.approx(np.logaddexp(0, -margins_M).mean(), rel=0.02)


def test_a_prompt_is_computed_once_for_all_its_answers() -> None:
    prompts = [[*range(10, 110)], [*range(10, 60), *range(200, 250)]]
    rows = [
        [[*prompt, 1000 + answer, 7] for answer in range(count)] for prompt, count in zip(prompts, (8, 3), strict=True)
    ]
    labels = labels_of([{"grades": list(range(len(row)))} for row in rows], 8)
    packed = pack_unpadded(rows, 0, labels, 8, attention_crossover_length=1e6)
    assert packed.input_ids_RL.size == 150 + 2 * 11  # both prompts' first 50 tokens once, too
    for row, answers, rewards in zip(packed.last_row_PK, packed.last_column_PK, rows, strict=True):
        assert [packed.input_ids_RL[r, c] for r, c in zip(row, answers, strict=True)][: len(rewards)] == [7] * len(
            rewards
        )
    assert packed.labels["is_there"].sum(axis=1).tolist() == [8, 3]


TWO = {"prompt": "a", "completions": ["b", "c"]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({**TWO, "scores": [1.0, 1.0]}, "Row 0 .*`scores` is .* no answer is better"),
    ({**TWO, "scores": [1.0, 1.0 + 1e-12]}, "Row 0 .*`scores` is .* no answer is better"),  # equal in float32
    ({**TWO, "scores": [1.0, 1e39]}, "Row 0 .*`scores` holds 1e\\+39"),
    ({**TWO, "completions": ["b", "c", "d"], "ranks": [1, 2, 2]}, "Row 0 .*`ranks` .*ties=None.*ties='skip'"),
    ({**TWO, "scores": [1.0, math.nan]}, "Row 0 .*`scores` holds nan"),
    ({**TWO, "scores": [1.0]}, "Row 0 .*`scores` .*a number for each of 2 answers"),
    ({**TWO, "completions": ["b"], "scores": [1.0]}, "Row 0 .*1 answers; there must be 2 to 64"),
    ({**TWO, "completions": ["b", None], "scores": [1, 2]}, r"Row 0 .*`completions\[1\]` is null"),
    (TWO, "Row 0 .*neither `scores` nor `ranks`"),
    ({"answer_ids": [[1], [2]], "grades": [1.0]}, "Row 0 .*`grades` .* of 2 answers"),
    ({"answer_ids": [[1], [2]], "grades": [1.0, math.nan]}, "Row 0 .*`grades` .*nan"),
    ({"answer_ids": [[1], [999]], "grades": [1.0, 2.0]}, "Row 0 .*`answer_ids` .*999"),
    ({"answer_ids": [[1], [2]], "grades": [1.0, 1.0]}, "Row 0 .*`grades` .* no answer is better"),
    ({"answer_ids": [[1], [2], [3]], "grades": [1.0, 1.0, 2.0]}, "Row 0 .*`grades` .*ties=None.*ties='skip'"),
    ({"answer_ids": [[1]] * 65, "grades": [float(place) for place in range(65)]}, "Row 0 .*65 answers.*2 to 64"),
    ({"answer_ids": [[1], [2]], "grades": [1.0, 1e300]}, "Row 0 .*`grades` holds"),
    ({"answer_ids": [[1], [2]], "grades": [1.0, 2.0], "margin": 1.0}, "`margin`"),
    ({**TWO, "scores": [1, 2], "margin": 1.0}, "`margin`"),
    ({**TWO, "scores": [1, 2], "chosen_probability": 1.0}, "`chosen_probability`"),
    ({"chosen": "a", "rejected": ["b", "c"], "margin": 1.0}, "`margin`"),
    ({"chosen": "a", "rejected": "b", "chosen_probability": 1.5}, "Row 0 .*`chosen_probability` is 1.5"),
]


def prepare(*rows: dict[str, Any], **settings: Any) -> Any:
    defaults: dict[str, Any] = {"num_embeddings": 300, "max_length": None, "num_proc": None, "name": "train"}
    return prepare_preference_dataset(Dataset.from_list(list(rows)), tiny_tokenizer(["a b c"]), **defaults | settings)


@pytest.mark.parametrize(("row", "text"), BAD)
def test_bad_rankings_are_refused_with_row_and_column(row: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        prepare(row)


def test_scores_that_grade_no_answers_do_not_stop_a_summary() -> None:
    answered = {"completions": ["a", "b"], "rewards": [1.0, 0.0], "not_scored": None}
    summary = Summary(("rewards",))
    for scores in (None, [1.0], {"helpful": 1}, [1.0, 1.0]):
        summary.add([answered | {"scores": scores}])
    assert not any("rankings" in line for line in summary.lines())
    summary.add([answered | {"ranks": [1, 2]}])
    assert {"rankings         2", "kendall_tau      1.0000"} <= set(summary.lines())


def test_rows_of_ties_alone_and_rows_without_scores() -> None:
    equal = {**TWO, "scores": [1.0, 1.0]}
    assert prepare(equal, rankings=Rankings(may_tie=True, may_all_tie=True))["grades"] == [[1.0, 1.0]]
    with pytest.raises(ValueError, match="Row 0 .*no `scores`.*regression"):
        prepare({**TWO, "ranks": [1, 2]}, rankings=Rankings(True, True, needs_scores=True))


@pytest.mark.parametrize("ties", [False, True])
def test_each_comparison_may_count_once(ties: bool) -> None:
    rows = [{**TWO, "completions": ["b", "c", "d"], "scores": [2, 1, 2]}, {**TWO, "scores": [0, 1]}]
    rankings = Rankings(may_tie=True, may_all_tie=ties, counts_comparisons=True)
    prepared = prepare(*rows, rankings=rankings).to_list()
    labels = {name: torch.from_numpy(values) for name, values in labels_of(prepared, 3).items()}
    rewards_PK = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, 0.0]])
    losses_P = Loss(ties="davidson" if ties else "skip").losses_of(rewards_PK, labels)
    assert sum(weights_of(prepared)) == labels["weight"].sum() == (4 if ties else 3)
    each = [(0.5, 2), (-1.0, 1), (2.0, 2)], [(1.0, 0), (0.0, 1)]
    one = [with_ties(row, "davidson", 1.0) if ties else instruct_gpt(row, 0, 0, 0) for row in each]
    assert losses_P.tolist() == pytest.approx([(3 if ties else 2) * one[0], one[1]], rel=1e-5)


def test_a_pair_beside_answers_without_grades_is_a_pair() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "completions": ["b", "c"], "labels": [1, 0]}
    assert set(prepare(pair).column_names) >= {"chosen_ids", "rejected_ids"}
    with pytest.raises(UserError, match="completions.*ranks"):
        prepare(pair | {"ranks": [1, 2]})


EXTRA: dict[str, Any] = {
    "grades": [4, 2], "grade": "A", "labels": [1], "weight": 2.0, "step": 1, "is_there": True, "end": 3,
    "comparisons_counted": 3, "input_ids": [1, 2], "attention_mask": [1], "answer_ids": ["x", "y"], "rank": 1,
}  # fmt: skip
FORMS = {
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5},
    "tokenized pairs": {"chosen_ids": [1], "rejected_ids": [2], "margin": 0.5},
    "rankings": {**TWO, "scores": [1.0, 2.0]},
    "tokenized rankings": {"answer_ids": [[1], [2]], "grades": [1.0, 2.0]},
    "one chosen, several rejected": {"prompt": "a", "chosen": "b", "rejected": ["c", "b c"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_extra_columns_change_no_row_and_no_label(form: str) -> None:
    row = FORMS[form]
    plain, more = prepare(row), prepare(row | {key: value for key, value in EXTRA.items() if key not in row})
    ids = id_columns(plain.column_names) or ()
    columns = [*ids, *[name for name in ("grades",) if name in plain.column_names]]
    assert id_columns(more.column_names) == ids
    answers = most_answers(plain)
    for prepared in (more, prepare(*more)):
        assert prepared.select_columns(columns)[:] == plain.select_columns(columns)[:]
        assert measure(prepared).checksum == measure(plain).checksum
        assert repr(labels_of(list(prepared), answers)) == repr(labels_of(list(plain), answers))
        assert weights_of(list(prepared)) == [1] and most_answers(prepared) == answers


def test_columns_of_both_forms_are_refused_and_settings_need_rankings() -> None:
    for halves in ({"chosen": "b", "rejected": "c"}, {"chosen_ids": [1], "rejected_ids": [2]}):
        for grades in ("scores", "ranks"):
            with pytest.raises(UserError, match=f"completions, {grades}"):
                prepare({**TWO, **halves, grades: [1.0, 2.0]})
    assert "chosen_ids" in prepare({"chosen": "b", "rejected": "c", "scores": [1.0, 2.0]}).column_names
    with pytest.raises(UserError, match="ranking_top_k=2"):
        prepare({"chosen": "b", "rejected": "c"}, rankings=Rankings(settings=("ranking_top_k=2",)))


def test_the_forms_of_rankings_and_those_that_are_too_long() -> None:
    rows = [{**TWO, "completions": ["b", "c", "d" * 9], "ranks": [2, 1, 2]}, {**TWO, "ranks": [1, 2]}]
    assert prepare(*rows, rankings=Rankings(may_tie=True))["grades"] == [[-2.0, -1.0, -2.0], [-1.0, -2.0]]
    assert prepare(*rows, rankings=Rankings(may_tie=True), max_length=4)["grades"] == [[-1.0, -2.0]]
    cut = prepare(*rows, rankings=Rankings(may_tie=True), max_length=4, truncation_mode="keep_start")["answer_ids"]
    assert [[len(ids) for ids in row] for row in cut] == [[3, 3, 4], [3, 3]]
    chosen = prepare({"prompt": "a", "chosen": "b", "rejected": ["c", "d"]})
    assert chosen["grades"] == [[1.0, 0.0, 0.0]] and [len(ids) for ids in chosen["answer_ids"][0]] == [3, 3, 3]
