"""Numbers of the verdict, checked manually, by brute force and by other libraries; as text and as JSON."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import preference_rows
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import binomtest

from trl_tpu.data.collate import pairs_of
from trl_tpu.errors import UserError
from trl_tpu.evaluation import evaluate
from trl_tpu.evaluation import verdict as numbers
from trl_tpu.evaluation.evaluate import NoComparisons, evaluate_best_of_n, evaluate_rows, padded
from trl_tpu.evaluation.verdict import BestOfN, Verdict, proportion, read_verdict, verdict_json
from trl_tpu.report.verdicts import LabeledRewards, as_markdown, markdown_text, printable, read_scored, sentences_of

HOSTILE = "\x1b[31m[bold]<script>|`x`*\n![a](b)"
margins = st.lists(st.floats(-40, 40) | st.just(0.0), min_size=1, max_size=60).map(np.array)


def evaluate_pairs(rewards_N2: Any, *more: Any, **named: Any) -> Verdict:
    return evaluate_rows(np.array(rewards_N2, float), pairs_of(len(rewards_N2)), *more, **named)


@given(st.integers(1, 500).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))))
def test_confidence_interval_equals_scipys(case: tuple[int, int]) -> None:
    expected = binomtest(*case).proportion_ci(0.95, method="wilson")
    ours = proportion(*case)
    assert (ours.low, ours.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= ours.low <= ours.value <= ours.high <= 1
    rounded = proportion(np.nextafter(1, 2) * case[1], case[1])  # a sum of weights
    assert rounded.low <= rounded.value <= rounded.high


BY_PROMPT = [
    ([[1] * 50, [0] * 50] * 10, 20 * 19 / 20 * 1000 / 999),  # each prompt is one item
    ([[1], [0], [1], [1]], 4),
    ([[1, 0]] * 9, 18),  # pairs of a prompt differ more than others: they count as independent
    ([[1] * 3, [1] * 3, [1] * 3, [1] * 3], 4),  # nothing is known about dependence
    ([[1, 1, 0, 1]], 1),
    ([[1, 1, 0], [1], [0, 0], [1, 0, 1, 1, 1]], None),
]


@pytest.mark.parametrize(("right_by_prompt", "items"), BY_PROMPT)
def test_interval_counts_dependent_pairs_of_a_prompt_less(right_by_prompt: list[list[int]], items: Any) -> None:
    """Compare with the sums of the formulas in `Proportion.of`."""
    flat = [right for prompt in right_by_prompt for right in prompt]
    prompts = [bytes([65 + number]) for number, prompt in enumerate(right_by_prompt) for _ in prompt] + [b"other"]
    mean, count, groups = np.mean(flat), len(flat), len(right_by_prompt)
    if items is None:
        sums = [sum(right - mean for right in each) for each in right_by_prompt]
        over_prompts = groups / (groups - 1) * sum(each**2 for each in sums)
        over_pairs = count / (count - 1) * sum((right - mean) ** 2 for right in flat)
        assert over_prompts > 1.1 * over_pairs
        items = count * over_pairs / over_prompts
    rewards_N2 = [(1.0, 0.0) if right else (0.0, 1.0) for right in flat] + [(math.nan, 0.0)]
    lengths_N2 = np.array([(2, 1)] * len(rewards_N2))
    found = evaluate_pairs(rewards_N2, lengths_N2, ["x"] * len(rewards_N2), prompts)
    expected = proportion(mean * items, items)
    assert found.length is not None and found.prompts == groups
    for share in (found.accuracy, found.groups["x"], found.length.chosen_is_longer, found.length.bins[0].accuracy):
        assert share is not None and (share.value, share.count) == (pytest.approx(mean), count)
        assert (share.low, share.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    alone = evaluate_pairs(rewards_N2, lengths_N2, ["x"] * len(rewards_N2))
    if groups == count:
        assert dataclasses.replace(found, prompts=None) == alone
    said = " ".join(sentences_of(found))
    assert (f"{count:,} pairs of {groups} prompt" in said) is (groups < count)


def test_twenty_prompts_do_not_tell_a_model_from_chance_or_from_length() -> None:
    rewards_N2, lengths_N2 = [(1.0, 0.0)] * 700 + [(0.0, 1.0)] * 300, np.array([(2, 1)] * 550 + [(1, 2)] * 450)
    few, many = ([f"{number // pairs:04}".encode() for number in range(1000)] for pairs in (50, 1))
    words = [" ".join(sentences_of(evaluate_pairs(rewards_N2, lengths_N2, None, each))) for each in (few, many)]
    assert ["chance" in said for said in words] == [True, False]
    assert ["not clearly" in said for said in words] == [True, False]
    words += [" ".join(sentences_of(evaluate_pairs(rewards_N2, lengths_N2)))]
    assert ["Prompts are unknown" in said for said in words] == [False, False, True]


def test_verdict_equals_manual_computation() -> None:
    log3 = math.log(3)  # sigmoid(log 3) = 3/4
    pairs = [(log3, 0), (0, log3), (1, 1), (2 + log3, 2), (math.nan, 0), (0, math.inf)]
    found = evaluate_pairs(pairs, groups=["a", "b\0", "b\0", "a", "c", "a"])
    assert (found.pairs, found.left_out, found.ties) == (4, 2, 1)
    assert (found.accuracy.value, found.accuracy.count) == (0.5, 4)
    assert (found.accuracy.low, found.accuracy.high) == pytest.approx((0.15004, 0.84996), abs=1e-5)
    assert found.pairwise_loss == pytest.approx((2 * math.log(4 / 3) + math.log(4) + math.log(2)) / 4)
    # three picks with confidence 3/4, two of them right; a tie with confidence 1/2, half right
    assert found.calibration.ece == pytest.approx(3 / 4 * (3 / 4 - 2 / 3))
    bins = [(each.high - each.low, each.count, each.accuracy) for each in found.calibration.bins]
    assert np.array(bins) == pytest.approx(np.array([(0.05, 1, 0.5), (0.05, 3, 2 / 3)]))
    assert found.calibration.brier == pytest.approx((2 * (1 / 4) ** 2 + (3 / 4) ** 2 + (1 / 2) ** 2) / 4)
    assert {name: (each.value, each.count) for name, each in found.groups.items()} == {"a": (1, 2), "b\0": (0, 2)}
    assert found.mean_over_groups == 0.5
    assert found.worst == (1, 2)
    assert found.margins.mean == pytest.approx(log3 / 4) and found.margins.quantiles["0.5"] == pytest.approx(log3 / 2)


@given(margins)
@example(np.array([-1.999999999999993, 0, 0, 0, 0]))
@example(np.array([5e-324]))
def test_histogram_counts_every_margin_once_with_an_edge_at_zero(margins_N: np.ndarray) -> None:
    found = numbers.Distribution.of(margins_N, np.ones(len(margins_N)))
    assert sum(found.counts) == len(margins_N) and len(found.edges) == len(found.counts) + 1 <= 42
    # numbers too small for distinct edges share a bin with zero, also tiny negative ones at the first edge
    if margins_N.min() < -1e-9 and margins_N.max() > 1e-9:
        zero = int(np.argmin(np.abs(found.edges)))
        assert found.edges[zero] == 0 and sum(found.counts[:zero]) == int((margins_N < 0).sum())


def test_accuracy_by_length_equals_manual_computation() -> None:
    # chosen is longer by 1, 2, 3 and 10 tokens, shorter by 4 and 5, and equal once
    longer_N = np.array([1, 2, 3, 10, -4, -5, 0])
    found = numbers.LengthBias.of(
        np.array([1, 1, 1, 0, 0, 1, 1]) > 0, longer_N, np.ones(7), np.tile(np.arange(7), (2, 1))
    )
    assert found.longer_wins == pytest.approx(4.5 / 7) and found.length_only == pytest.approx(4.5 / 7)
    assert found.chosen_is_longer is not None and found.rejected_is_longer is not None
    assert (found.chosen_is_longer.value, found.rejected_is_longer.value) == (3 / 4, 1 / 2)
    assert found.controlled == pytest.approx((3 / 4 + 1 / 2) / 2)
    shown = [(each.shortest, each.longest, each.accuracy.value, each.accuracy.count) for each in found.bins]
    assert shown == [(-5, -5, 1, 1), (-4, -4, 0, 1), (0, 0, 1, 1), (1, 2, 1, 2), (3, 3, 1, 1), (10, 10, 0, 1)]
    equal = numbers.LengthBias.of(np.array([True, False]), np.zeros(2), np.ones(2), np.eye(2, dtype=int))
    assert (equal.longer_wins, equal.length_only, equal.controlled) == (0.5, 0.5, None)
    assert [each.accuracy.count for each in equal.bins] == [2]


def test_sample_of_comparisons_is_near_all(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = np.random.default_rng(0)
    rewards_N2, lengths_N2 = chooser.normal(size=(2000, 2)) + [0.5, 0.0], chooser.integers(1, 9, (2000, 2))
    groups = [str(number % 3) for number in range(2000)]
    whole = evaluate_pairs(rewards_N2, lengths_N2, groups)
    monkeypatch.setattr(evaluate, "_MAX_COMPARISONS_PER_PART", 2000)
    assert evaluate_pairs(rewards_N2, lengths_N2, groups) == whole
    monkeypatch.setattr(evaluate, "_SAMPLE", 500)
    sampled = evaluate_pairs(rewards_N2, lengths_N2, groups)
    assert (sampled.pairs, sampled.accuracy, sampled.groups) == (whole.pairs, whole.accuracy, whole.groups)
    assert (
        sampled.pairwise_loss == pytest.approx(whole.pairwise_loss, rel=0.1)
        and sampled.pairwise_loss != whole.pairwise_loss
    )
    assert 0 < sum(sampled.margins.counts) <= 1000


DESCRIBED = [
    ([6.0] * 90 + [-6.0] * 10, [1, -1] * 50, ["90.0% (82.6% to 94.5% at 95 %) of 100 pairs"]),
    ([2.0] * 88 + [-2.0] * 12, [1] * 88 + [-1] * 12, ["88.0%", "favors longer"]),
    ([0.1, -0.1] * 20, [1, -1, -1, 1] * 10, ["from chance", "calibration error"]),
    ([0.1] * 8 + [-0.1] * 32, [1, -1] * 20, ["worse than chance"]),
]


@pytest.mark.parametrize(("margins_N", "longer", "said"), DESCRIBED)
def test_sentences_describe_the_numbers(margins_N: list[float], longer: list[int], said: list[str]) -> None:
    lengths_N2 = [(10 + more, 10) for more in longer]
    words = " ".join(sentences_of(evaluate_pairs([(margin, 0) for margin in margins_N], np.array(lengths_N2))))
    assert [each for each in said if each not in words] == []


@pytest.fixture
def verdict() -> Verdict:
    chooser = np.random.default_rng(0)
    rewards_N2 = chooser.normal(size=(200, 2)) + [1.0, 0.0]
    rewards_N2[0, 0] = math.nan
    groups = [("math", "chat", HOSTILE)[number % 3] for number in range(200)]
    return evaluate_pairs(rewards_N2, chooser.integers(1, 500, (200, 2)), groups=groups)


def test_tables_for_terminal_and_model_card_escape_data(verdict: Verdict) -> None:
    for clean in (printable, markdown_text):
        text = as_markdown({"one": verdict, "two": verdict}, clean)
        for table in (block for block in text.split("\n\n") if block.startswith("|")):
            assert len({len(line) for line in table.splitlines()}) == 1, "columns are aligned"
            if clean is markdown_text:
                assert len({line.count("|") for line in table.splitlines()}) == 1
        lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
        assert lines["accuracy"].count(f"{verdict.accuracy.value:.4f} ({verdict.accuracy.low:.3f} to") == 2
        assert lines["math"].count(f"{verdict.groups['math'].value:.4f}") == 2
        assert "\x1b" not in text and ("[bold]<script>" in text) is (clean is printable)
    assert "<" not in text and "![a]" not in text and "&lt;script>" in text


def test_json_holds_the_whole_verdict_with_null_for_unknowns(verdict: Verdict, tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"

    def content() -> Any:
        return json.loads(path.read_text(), parse_constant=pytest.fail)

    path.write_text(verdict_json(verdict))
    assert content()["kind"] == "pairs" and content()["left_out"] == 1
    assert content()["groups"]["math"]["count"] == verdict.groups["math"].count
    assert read_verdict(path) == verdict
    earlier = content() | {"loss": content()["pairwise_loss"]}
    path.write_text(json.dumps({key: earlier[key] for key in earlier.keys() - {"pairwise_loss", "prompts"}}))
    assert read_verdict(path) == verdict, "a file of an earlier version"
    rewards, grades = padded([[3, 1], [4, 3, 1], [0, 1]]), padded([[1, 0], [1, 1, 0], [1, 0]])
    best = evaluate_best_of_n(rewards, grades, ["ref:1", "tied:1", ""], ["Ties", "Ties", "Math"])
    path.write_text(verdict_json(best))
    assert repr(read_verdict(path)) == repr(best), "NaN is not equal to itself"
    assert content()["kind"] == "best_of_n" and content()["groups"]["Ties"]["low"] is None
    text = as_markdown({"x": best}, printable)
    assert f"{best.mean_over_groups:.4f}" in text and "nan" not in text


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "other"}', '{"kind": "pairs", "pairs": 3}'])
def test_file_without_a_verdict_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "verdict.json").write_text(text)
    with pytest.raises(UserError, match="verdict.json"):
        read_verdict(tmp_path / "verdict.json")


# ---- several answers are scored by RewardBench 2's published rules

few = st.integers(-3, 3).map(float)
Answers = tuple[list[float], list[float], str]  # rewards of right answers, rewards of wrong answers, id


def evaluate_answers(rows: list[Answers], groups: Any = None) -> BestOfN:
    grades = [[1.0] * len(right) + [0.0] * len(wrong) for right, wrong, _ in rows]
    rewards = [[*right, *wrong] for right, wrong, _ in rows]
    return evaluate_best_of_n(padded(rewards), padded(grades), [id_ for *_, id_ in rows], groups)


def ties_score(rows: list[Answers]) -> float:
    return evaluate_answers(rows, ["Ties"] * len(rows)).groups["Ties"].value


@given(
    st.lists(
        st.tuples(few, st.lists(few, min_size=1, max_size=3), st.lists(few, min_size=2, max_size=4), few),
        min_size=1,
        max_size=5,
    )
)
def test_ties_score_follows_the_published_rule(questions: list[tuple[float, list[float], list[float], float]]) -> None:
    """Compare with a second implementation of the paper's rule. The last question has no ref, and is wrong."""
    rows: list[Answers] = [([4.0, 2.0], [3.0], "tied:alone")]
    ref_right, tied_right, soft, hard, beyond = 0, 0, 0, 0, 0.0
    for number, (reference, wrong, right, other) in enumerate(questions):
        rows += [([reference], wrong, f"ref:{number}"), (right, [other], f"tied:{number}")]
        gap_ref, gap_tied, spread = reference - max(wrong), min(right) - other, max(right) - min(right)
        ref_right += gap_ref > 0
        tied_right += gap_tied > 0
        soft += gap_tied > spread
        hard += min(gap_ref, gap_tied) > spread
        smaller = min(gap_ref, gap_tied)
        if spread:
            beyond += math.tanh(smaller / spread - 1)
        elif smaller:
            beyond += math.copysign(1.0, smaller)
    count = len(questions)
    expected = 0.3 * tied_right / (count + 1) + (0.3 * ref_right + 0.2 * soft + 0.2 * hard + 0.01 * beyond) / count
    assert ties_score(rows) == pytest.approx(expected, abs=1e-12)


def test_leaderboard_score_is_the_mean_over_subsets() -> None:
    ties: list[Answers] = [([5.0], [1.0], "ref:1"), ([4.0, 3.0], [1.0, 0.0], "tied:1")]
    # credit 1, since the best of several right answers counts; 1/3, 2/3 and 0
    focus: list[Answers] = [([1.0, 3.0], [2.0], ""), ([1.0], [1.0, 0.0, 1.0], ""), ([3.0, 3.0], [3.0], "")]
    rows = [*focus, ([0.0], [1.0], ""), *ties, ([math.nan], [1.0], "")]
    found = evaluate_answers(rows, ["Focus"] * 3 + ["Math", "Ties", "Ties", "Math"])
    assert (found.rows, found.left_out) == (6, 1)
    assert {name: (each.value, each.count) for name, each in found.groups.items()} == {
        "Focus": (pytest.approx(2 / 3), 3),
        "Math": (0, 1),
        "Ties": (pytest.approx(ties_score(ties)), 2),
    }
    assert found.mean_over_groups == pytest.approx((2 / 3 + 0 + ties_score(ties)) / 3)
    assert found.accuracy.value == pytest.approx(4 / 6) and found.worst == (3, 1, 2)


@pytest.mark.parametrize("ids", [["7"], ["ref:7"], ["ref:7", "tied:7"], ["ref:7", "tied:8", "tied:8"]])
def test_rows_unreadable_by_the_ties_rule_are_rejected(ids: list[str]) -> None:
    with pytest.raises(UserError, match="ref:NUMBER"):
        ties_score([([1.0], [0.0], id_) for id_ in ids])


# ---- scored rows are read back from files

PAIR = {"chosen": "abc", "rejected": "a", "reward_chosen": 1.0, "reward_rejected": 0.5}
MANY = {"chosen": ["ab", "c"], "rejected": ["def"], "reward_chosen": [1.0, None], "reward_rejected": [0]}
BROKEN = {"reward_chosen": None, "reward_rejected": None, "not_scored": "line 3: no JSON"}


def write(folder: Path, rows: list[dict[str, Any]], suffix: str = ".jsonl") -> Path:
    path = folder / f"scored{suffix}"
    if suffix.lower() == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    return preference_rows.write_jsonl(path, rows)


def verdict_on(folder: Path, rows: list[dict[str, Any]], suffix: str = ".jsonl", **how: Any) -> Verdict:
    found = read_scored(write(folder, rows, suffix), **how).verdict
    assert isinstance(found, Verdict)
    return found


@pytest.mark.parametrize("suffix", [".jsonl", ".PARQUET"])
def test_pairs_are_evaluated(tmp_path: Path, suffix: str) -> None:
    too_large = {"reward_chosen": 1e308, "reward_rejected": -1e308}  # too large for float32
    found = verdict_on(tmp_path, [PAIR, PAIR | {"reward_chosen": None}, PAIR | too_large], suffix)
    assert (found.pairs, found.left_out, found.accuracy.value) == (1, 2, 1)


def test_only_steps_with_labels_are_evaluated(tmp_path: Path) -> None:
    solution = {"completions": ["b", "c"], "step_rewards": [-0.5, 2.0]}
    labels: list[Any] = [[0, 1], [1], [-1, 1], [None, 1], ["good", "bad"], True, None]
    found = verdict_on(tmp_path, [solution | {"labels": each} for each in labels])
    assert (found.of, found.pairs, found.left_out, found.accuracy.value) == ("steps", 3, 5, 1)
    beside = {"completions": ["b", "c"], "labels": [0, 1]}
    assert verdict_on(tmp_path, [PAIR | beside]).of == "pairs"
    ranked = verdict_on(tmp_path, [beside | {"rewards": [2.0, 1.0], "ranks": [2, 1]}])
    assert (ranked.of, ranked.accuracy.value) == ("pairs", 0)
    with pytest.raises(UserError, match="1 answers"):
        read_scored(write(tmp_path, [beside | {"rewards": [2.0, 1.0]}]))


def single(number: int, **labels: Any) -> dict[str, Any]:
    return {"prompt": f"p {number}", "completions": ["a"], "rewards": [0.1 * number]} | labels


RANKED = {"prompt": "q", "completions": ["a", "b"], "scores": [1, 0], "rewards": [0.1, 0.2]}
STEPS = RANKED | {"labels": [1, 0], "step_rewards": [0.3, -0.2]}


KINDS_OF_ROWS = [
    ([[single(0), single(1)]], None, 0),  # without labels
    ([[single(n, scores=[n]) for n in range(3)]], "scores", 3),
    ([[single(n, scores=[5.0]) for n in range(3)], [RANKED] * 2], "pairs", 2),
    ([[RANKED] * 2, [single(n, scores=[5.0]) for n in range(3)]], "pairs", 2),
    ([[single(n, scores=[0.4 * n]) for n in range(3)] + [single(4, completions=["a", "b"])]], "answers", 3),
    ([[STEPS]], "steps", 2),
]


@pytest.mark.parametrize(("windows", "of", "count"), KINDS_OF_ROWS)
def test_windows_of_scored_rows_of_several_kinds(windows: list[Any], of: str | None, count: int) -> None:
    labeled = LabeledRewards()
    for rows in windows:
        labeled.add(rows, [*{name for row in rows for name in row}])
    if of is None:
        with pytest.raises(NoComparisons):
            labeled.verdict()
        return
    verdict: Any = labeled.verdict()
    found_of = ("scores", verdict.answers) if isinstance(verdict, numbers.ScoreFit) else (verdict.of, verdict.pairs)
    assert found_of == (of, count)


def test_token_counts_are_used_if_every_row_has_them(tmp_path: Path) -> None:
    counted = PAIR | {"tokens_chosen": 7, "tokens_rejected": 9}
    found = verdict_on(tmp_path, [counted, counted, BROKEN]).length
    assert found is not None and [each.middle for each in found.bins] == [-2]
    assert verdict_on(tmp_path, [counted, PAIR]).length is None


def test_rows_are_grouped_by_subset_or_any_column(tmp_path: Path) -> None:
    rows = [MANY | {"subset": "Math", "reward_chosen": [2, 1]}, MANY | {"subset": "Focus"}]
    found = read_scored(write(tmp_path, rows)).verdict
    assert isinstance(found, BestOfN) and (found.rows, found.left_out, list(found.groups)) == (1, 1, ["Math"])
    rows = [PAIR | {"source": label} for label in ("web", None, 3, "web")]
    groups = verdict_on(tmp_path, rows, eval_by="source").groups
    assert {name: each.count for name, each in groups.items()} == {"3": 1, "none": 1, "web": 2}


INVALID_ROWS = [
    ("scored.jsonl", "", "0 pairs"),
    ("scored.jsonl", '{"reward": 1}\n{\n', "line 2:"),
    ("scored.jsonl", "[1]\n", "line 1:"),
    ("scored.jsonl", '{"reward": 1.5, "text": "a"}\n', "1 pairs"),
    ("scored.jsonl", '{"reward_chosen": "high", "reward_rejected": 1}\n', "scored.jsonl .*'high'"),
    ("scored.jsonl", '{"reward_chosen": 1, "reward_rejected": 2}\n', "'by'"),
    ("x.parquet", "reward\n1\n", "x.parquet"),
]


@pytest.mark.parametrize(("file", "text", "name"), INVALID_ROWS)
def test_invalid_scored_row_is_named(tmp_path: Path, file: str, text: str, name: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=name):
        read_scored(tmp_path / file, "by" if name == "'by'" else None)


@pytest.mark.parametrize("row", [PAIR, MANY | {"reward_chosen": [2, 1]}])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_row_without_a_reward_is_skipped(tmp_path: Path, row: dict[str, Any], place: int) -> None:
    """A broken line has only the score columns, with null instead of a list."""
    rows = [row | {"subset": "Math"}, row | {"subset": "Focus"}]
    rows.insert(place, BROKEN)
    found = read_scored(write(tmp_path, rows)).verdict
    assert found.left_out == 1 and found.groups.keys() == {"Math", "Focus"}
    with pytest.raises(UserError, match="2 pairs"):
        read_scored(write(tmp_path, [BROKEN, BROKEN]))


def test_better_answer_is_the_more_probable_one(tmp_path: Path) -> None:
    row = {"chosen": "a", "rejected": "b", "not_scored": None}
    cases = [(0.9, 1.0, 0.0), (0.1, 0.0, 2.0), (0.5, 3.0, 0.0)]
    rows = [row | {"chosen_probability": p, "reward_chosen": c, "reward_rejected": r} for p, c, r in cases]
    verdict = verdict_on(tmp_path, rows)
    assert (verdict.pairs, verdict.accuracy.value, verdict.margins.mean) == (2, 1.0, 1.5)
    with pytest.raises(UserError, match="1 pairs"):
        verdict_on(tmp_path, rows[2:])
