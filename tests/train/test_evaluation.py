"""Evaluation and prediction: every pair once and in order, metrics that equal direct model calls, and the verdict."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from label_formats import LABEL_FORMATS, LabelFormat, answers, format_in, solutions
from preference_rows import assistant, score_command, user, write_jsonl
from torch.nn.functional import logsigmoid
from training import QUIET, trained
from transformers import AutoModelForTokenClassification, AutoTokenizer, EvalPrediction

from trl_tpu import RewardConfig, RewardTrainer, cli
from trl_tpu.config.reward_config import METRICS
from trl_tpu.errors import UserError
from trl_tpu.evaluation.verdict import ScoreFit, proportion
from trl_tpu.experimental.prm import PRMConfig, PRMTrainer
from trl_tpu.report import pages
from trl_tpu.report.pages import read_run
from trl_tpu.scripts.report import write_report
from trl_tpu.trainer.evaluating_trainer import EvaluatedRows

HALVES = ("chosen", "rejected")


def make_trainer(
    model: str, out: Path, eval_dataset: Any = None, train: Any = None, kind: Any = RewardTrainer, **given: Any
) -> RewardTrainer:
    """Build a trainer; ``given`` holds settings and functions of the trainer."""
    functions = {name: given.pop(name) for name in ["compute_metrics"] if name in given}
    defaults = QUIET | {"per_device_eval_batch_size": 4, "save_strategy": "no"}
    train = tiny.made_up_pairs(16) if train is None else train
    args = RewardConfig(str(out), **(defaults | given))
    return kind(model, args, train_dataset=train, eval_dataset=eval_dataset, **functions)


def test_evaluate_and_predict_equal_a_float64_computation(model_folder: str, tmp_path: Path) -> None:
    """Several datasets, each under its name. With 11 pairs in batches of 4, the last batch counts for its 3 pairs."""
    sets = {"easy": tiny.made_up_pairs(6, seed=5, margin=True), "hard": tiny.made_up_pairs(11, seed=3, margin=True)}
    trainer = make_trainer(model_folder, tmp_path, sets)
    metrics = trainer.evaluate()
    for name, pairs in sets.items():
        texts = [row["prompt"] + row[half] for row in pairs for half in HALVES]
        rewards_N2 = torch.tensor(tiny.rewards_alone(model_folder, texts, torch.float64)).view(-1, 2)
        difference_N = rewards_N2[:, 0] - rewards_N2[:, 1]
        expected = {"accuracy": (difference_N > 0).double().mean(), "margin": difference_N.mean(), "tie_rate": 0.0}
        expected |= {"min_reward": rewards_N2.min(), "mean_reward": rewards_N2.mean(), "max_reward": rewards_N2.max()}
        expected["loss"] = -logsigmoid(difference_N - torch.tensor(pairs["margin"])).mean()
        expected["length_only_accuracy"] = 1.0
        for key, value in expected.items():
            assert metrics[f"eval_{name}_{key}"] == pytest.approx(float(value), abs=1e-6), key  # rewards are float32
        output = trainer.predict(pairs)
        np.testing.assert_allclose(output.predictions, rewards_N2.numpy(), atol=1e-6)
        assert output.label_ids.tolist() == [0] * len(pairs)
        assert output.metrics["test_accuracy"] == metrics[f"eval_{name}_accuracy"]
    # every rejected answer is longer, so there is no balanced accuracy over lengths
    names = {f"eval_{name}_{key}" for name in sets for key in (*METRICS, "length_only_accuracy")}
    assert {key for key in metrics if key != "epoch" and "preparation_time" not in key} == names


def test_batch_eval_metrics_gets_each_batch_once(model_folder: str, tmp_path: Path) -> None:
    sizes: list[int] = []

    def count_pairs(prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        sizes.append(len(prediction.predictions))
        return {"pairs": sum(sizes)} if compute_result else {}

    trainer = make_trainer(model_folder, tmp_path, compute_metrics=count_pairs, batch_eval_metrics=True)
    pairs = tiny.made_up_pairs(10)
    for data in (pairs, pairs.to_iterable_dataset()):  # the length of a stream is unknown
        sizes.clear()
        metrics = trainer.evaluate(data, metric_key_prefix="held_out")
        assert sizes == [4, 4, 2] and metrics["held_out_pairs"] == 10
        assert all(key.startswith("held_out_") for key in metrics if key != "epoch")


def test_prediction_loss_only_returns_only_the_loss(model_folder: str, tmp_path: Path) -> None:
    def fail(prediction: EvalPrediction) -> dict[str, float]:
        raise AssertionError("compute_metrics got predictions")

    pairs = tiny.made_up_pairs(6)
    whole = make_trainer(model_folder, tmp_path).evaluate(pairs)
    trainer = make_trainer(model_folder, tmp_path, compute_metrics=fail, prediction_loss_only=True)
    loss = pytest.approx(whole["eval_loss"], abs=1e-6)  # the weights of another load may be aligned otherwise
    assert trainer.evaluate(pairs)["eval_loss"] == loss
    output = trainer.predict(pairs)
    assert len(output.predictions) == 0 and output.metrics["test_loss"] == loss


LABELS = ["web", "book", None]


def labeled(count: int, seed: int = 3) -> Dataset:
    """Return pairs with the label of their source; every third has a longer chosen answer."""
    rows: Any = tiny.made_up_pairs(count, seed=seed).to_list()
    for number, row in enumerate(rows):
        row["source"] = LABELS[number % 3]
        if number % 3 == 0:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    return Dataset.from_list(rows)


def mean_loss(prediction: EvalPrediction) -> dict[str, float]:
    return {"mean_of_losses": float(np.mean(prediction.losses))}


@pytest.mark.parametrize("average_over", ["prompts", "comparisons"])
def test_losses_passed_to_metrics_average_to_the_loss(model_folder: str, tmp_path: Path, average_over: str) -> None:
    class Doubled(RewardTrainer):
        def compute_loss(self, *args: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(*args, return_outputs=True, **more)
            return (2 * loss, outputs) if return_outputs else 2 * loss

    rankings, settings = tiny.made_up_rankings(7), {"include_for_metrics": ["loss"], "average_over": average_over}
    for kind in (RewardTrainer, Doubled):
        trainer = make_trainer(model_folder, tmp_path, rankings, rankings, kind, compute_metrics=mean_loss, **settings)
        metrics = trainer.evaluate()
        assert metrics["eval_mean_of_losses"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


def test_eval_accumulation_steps_sets_moves_to_the_host(model_folder: str, tmp_path: Path) -> None:
    found = []
    for steps in (None, 2):
        trainer = make_trainer(model_folder, tmp_path, eval_accumulation_steps=steps)
        moves = {"autospec": True, "side_effect": EvaluatedRows._move_to_host}
        with patch.object(EvaluatedRows, "_move_to_host", **moves) as move:
            found.append((trainer.evaluate(tiny.made_up_pairs(19))["eval_loss"], move.call_count))
    assert found == [(found[0][0], 1), (found[0][0], 3)]  # moves to the host for 5 batches


TIED = tiny.made_up_rankings(5).map(lambda row: {"scores": [1.0] * len(row["scores"])})
NOTHING_COMPARED: list[tuple[Any, dict[str, Any]]] = [
    (TIED, {"loss_type": "regression"}),
    (TIED, {"ties": "davidson"}),
    (tiny.made_up_pairs(5).add_column("chosen_probability", [0.5] * 5), {}),
]


@pytest.mark.parametrize("case", NOTHING_COMPARED)
def test_training_continues_after_evaluation_without_comparisons(model_folder: str, tmp_path: Path, case: Any) -> None:
    data, settings = case
    schedule: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    train = tiny.made_up_rankings(8) if "scores" in data.column_names else None
    trainer = trained(make_trainer(model_folder, tmp_path, data, train=train, **schedule, **settings))
    evaluated = [log for log in trainer.state.log_history if "eval_loss" in log]
    assert len(evaluated) == 2 and all("eval_mean_reward" in log and "eval_accuracy" not in log for log in evaluated)
    assert "eval" not in trainer.verdicts


PAIRS, RANKINGS = tiny.made_up_pairs(8), tiny.made_up_rankings(8)
CARDS: list[tuple[Any, dict[str, Any], list[str]]] = [
    (PAIRS, {}, ["Bradley and Terry", "Nothing was truncated"]),
    (tiny.made_up_pairs(8, margin=True), {"truncation_mode": "keep_end"}, ["- margin)`", "truncated: the last"]),
    (PAIRS.add_column("chosen_probability", [0.7] * 8), {"label_smoothing": 0.1}, ["`chosen_probability`", "0.1"]),
    (PAIRS, {"center_rewards_coefficient": 0.01}, ["0.01 times"]),
    (RANKINGS, {"loss_type": "regression"}, ["squared error"]),
    (RANKINGS, {"loss_type": "plackett_luce"}, ["Plackett", "prompt counts once"]),
    (RANKINGS, {"ties": "davidson", "average_over": "comparisons"}, ["Davidson"]),
    (RANKINGS, {"ties": "rao_kupper"}, ["Rao and Kupper"]),
    (RANKINGS, {"margin_scale": 0.5}, ["Ouyang", "times 0.5"]),
    (answers(8), {"weight_decay": 0.1}, ["sigmoid of its reward", "8 answers", "weight decay 0.1"]),
]
NAMED_LOSSES = {"Bradley", "squared error", "Plackett", "Davidson", "Rao and Kupper", "sigmoid of its reward"}


@pytest.mark.parametrize("case", CARDS)
def test_model_card_states_loss_and_truncation(model_folder: str, tmp_path: Path, case: Any) -> None:
    data, settings, stated = case
    make_trainer(model_folder, tmp_path, data, train=data, **settings).create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert [words for words in stated if words not in card] == []
    assert len([name for name in NAMED_LOSSES if name in card]) == 1
    assert ("Nothing was truncated" in card) is ("truncation_mode" not in settings)
    assert "licence" not in card and "None" not in card and "Seed: 42" in card


BY_SOURCE = {"eval_accuracy/web": True, "eval_ece": False, "brier": False, "length_controlled_accuracy": True}
#: Data, settings, existing metrics and whether greater values are better; and metrics that do not exist.
BEST: list[tuple[Any, dict[str, Any], dict[str, bool], list[str]]] = [
    (RANKINGS, {}, {"kendall_tau": True, "eval_top1_accuracy": True, "accuracy": True}, ["nonsense", "accuracy/a"]),
    (labeled(6), {"eval_by": "source"}, BY_SOURCE, ["kendall_tau", "accuracy/typo"]),
    (labeled(6), {}, {"accuracy": True}, ["eval_accuracy/web"]),
    (TIED, {"loss_type": "regression"}, {"loss": False, "mean_reward": True}, ["accuracy"]),
]


@pytest.mark.parametrize("case", BEST)
def test_metric_for_best_model_must_be_measured(model_folder: str, tmp_path: Path, case: Any) -> None:
    data, settings, measured, others = case

    def make(name: str) -> RewardTrainer:
        best = settings | {"metric_for_best_model": name, "eval_strategy": "epoch", "save_strategy": "epoch"}
        return make_trainer(model_folder, tmp_path, data, train=data, load_best_model_at_end=True, **best)

    for name, more_is_better in measured.items():
        trainer = make(name)
        assert trainer.args.greater_is_better is more_is_better, name
    assert {f"eval_{name.removeprefix('eval_')}" for name in measured} <= trainer.evaluate().keys()
    for name in others:
        with pytest.raises(UserError, match="metric_for_best_model"):
            make(name)


def test_evaluation_after_training_counts_tokens_since_the_last_log(model_folder: str, tmp_path: Path) -> None:
    counts = []
    for logging_steps in (1, 2):
        trainer = trained(make_trainer(model_folder, tmp_path, max_steps=3, logging_steps=logging_steps))
        counts.append(trainer.evaluate(tiny.made_up_pairs(8))["eval_num_tokens"])
    assert counts[0] == counts[1] > 0


# ---- the verdict


@pytest.mark.parametrize("packing", [False, "auto"])
def test_evaluation_logs_the_verdict_by_label_and_length(model_folder: str, tmp_path: Path, packing: Any) -> None:
    pairs = labeled(26)
    trainer = make_trainer(model_folder, tmp_path, pairs, eval_by="source", packing=packing)
    metrics, tokenizer = trainer.evaluate(), trainer.processing_class
    chosen_N, rejected_N = trainer.predict(pairs).predictions.T
    right_N = chosen_N > rejected_N
    lengths_2N = np.array([[*map(len, tokenizer(pairs[half][:]).input_ids)] for half in HALVES])
    longer_N = lengths_2N[0] - lengths_2N[1]
    of_labels, of_lengths = [right_N[n::3].mean() for n in range(3)], [right_N[longer_N > 0], right_N[longer_N < 0]]
    expected = dict(zip(("accuracy/web", "accuracy/book", "accuracy/none"), of_labels, strict=True)) | {
        "mean_accuracy_over_groups": np.mean(of_labels),
        "length_only_accuracy": max((longer_N > 0).mean(), (longer_N < 0).mean()),
        "length_controlled_accuracy": np.mean([each.mean() for each in of_lengths]),
        "accuracy": right_N.mean(),  # TRL's metrics are unchanged
    }
    assert {name: metrics[f"eval_{name}"] for name in expected} == pytest.approx(expected)


def test_verdict_and_pictures_are_saved_with_the_model_and_its_card(model_folder: str, tmp_path: Path) -> None:
    hostile = labeled(12).map(lambda row: {"source": f"<b>|{row['source']}`"})
    trainer = make_trainer(model_folder, tmp_path, hostile, eval_by="source", train=hostile)
    metrics, prompts = trainer.evaluate(), len(set(hostile["prompt"]))
    trainer.create_model_card()
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["accuracy"]["value"] == metrics["eval_accuracy"]
    card = (tmp_path / "README.md").read_text()
    assert card.index("## Evaluation") < card.index("## Training procedure")
    assert f"{metrics['eval_accuracy']:.4f} ({metrics['eval_accuracy_low']:.3f} to" in card
    assert f"{prompts} of {prompts} evaluation prompts" in card
    assert "<b>" not in card and "&lt;b>" in card and "pypi" not in card
    for name in ("verdict_margins.png", "verdict_reliability.png"):
        assert f"]({name})" in card and (tmp_path / name).read_bytes().startswith(b"\x89PNG")


PROMPT_FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "pairs": lambda row: row,
    "messages": lambda row: {half: [assistant(row[half])] for half in HALVES} | {"prompt": [user(row["prompt"])]},
    "whole messages": lambda row: {half: [user(row["prompt"]), assistant(row[half])] for half in HALVES},
    "whole texts": lambda row: {half: row["prompt"] + row[half] for half in HALVES},
}


def predicted(count: int) -> Dataset:
    """Return single answers with a score, and a label that a regression does not read."""
    return answers(count).map(lambda row, at: {"score": at % 7 - 2.0, "label": 1.0}, with_indices=True)


def neutral(count: int) -> Dataset:
    """Return solutions with some steps that are neither right nor wrong; in the first, no step is anything else."""
    rows = solutions(count).to_list()
    for at, row in enumerate(rows):
        is_neutral = [not at or (place + at) % 3 == 0 for place in range(len(row["labels"]))]
        row["labels"] = [-1 if skip else int(label) for label, skip in zip(row["labels"], is_neutral, strict=True)]
    return Dataset.from_list(rows)


OF_STEPS: Any = (2, AutoModelForTokenClassification)
OTHER_LABELS = {
    "predicted scores": LabelFormat(predicted, settings={"loss_type": "regression"}),
    "wrong if neutral": LabelFormat(neutral, *OF_STEPS, {"neutral_steps": "wrong"}, PRMConfig, PRMTrainer),
    "ignored if neutral": LabelFormat(neutral, *OF_STEPS, {"neutral_steps": "ignore"}, PRMConfig, PRMTrainer),
}


@pytest.mark.parametrize("form", [*PROMPT_FORMS, *LABEL_FORMATS, *OTHER_LABELS])
def test_evaluation_card_score_and_report_agree(
    model_folder: str, tmp_path: Path, form: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda _: None)  # without pictures, which take most of the time
    own, convert = OTHER_LABELS.get(form) or format_in(form), PROMPT_FORMS.get(form, lambda row: row)
    rows = [convert({**row, "prompt": f"Count on from {n % 9}:"}) for n, row in enumerate(own.rows(45).to_list())]
    args = own.config(str(tmp_path / "run"), **QUIET | own.settings | {"per_device_eval_batch_size": 4})
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    data = Dataset.from_list(rows)
    trainer = own.trainer(
        own.model(model_folder), args, train_dataset=data, eval_dataset=data, processing_class=tokenizer
    )
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card()
    scored = tmp_path / "scored.jsonl"
    assert cli.main(score_command(tmp_path / "run", write_jsonl(tmp_path / "rows.jsonl", rows), scored)) == 0
    _, verdicts = write_report([scored], tmp_path / "report")
    said = [json.loads((tmp_path / folder / "verdict.json").read_text()) for folder in ("run", "report")]
    card, printed, (found,) = (tmp_path / "run" / "README.md").read_text(), capsys.readouterr().out, verdicts.values()
    if isinstance(found, ScoreFit):
        for key in ("answers", "squared_error", "variance", "correlation"):
            assert said[0][key] == pytest.approx(said[1][key], rel=1e-5), key
        assert metrics["eval_squared_error"] == said[0]["squared_error"] == pytest.approx(metrics["eval_loss"])
        shown = f"{said[0]['squared_error']:.4f}"
        assert shown in printed and shown in card and "accuracy" not in card
        return
    shown = "{value:.4f} ({low:.3f} to {high:.3f})".format(**said[0]["accuracy"])
    assert shown in printed and shown in card
    assert said[0]["accuracy"]["low"] == metrics["eval_accuracy_low"]
    assert [each["prompts"] for each in said] == [9, 9]
    assert said[0]["pairwise_loss"] == pytest.approx(said[1]["pairwise_loss"], abs=1e-5)
    for key in ("pairs", "accuracy", "top1_accuracy", "groups", "length"):  # counts of answers and tokens
        assert said[0][key] == said[1][key], key
    unclustered = proportion(found.accuracy.value * found.accuracy.count, found.accuracy.count)
    assert found.accuracy.low <= unclustered.low and found.accuracy.high >= unclustered.high


def test_checkpoint_has_the_verdict_of_each_dataset(model_folder: str, tmp_path: Path) -> None:
    sets = {"easy one": labeled(6), "hard": labeled(9, seed=6)}
    schedule: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    trainer = trained(make_trainer(model_folder, tmp_path, sets, save_steps=2, **schedule))
    found = read_run(tmp_path, "run")
    assert {name: each.pairs for name, each in found.verdicts.items()} == {"run: easy one": 6, "run: hard": 9}  # type: ignore[union-attr]
    assert list(found.evaluated("accuracy")) == ["easy one", "hard"]
    logged = {key for record in trainer.state.log_history for key in record}
    assert {"eval_hard_ece", "eval_easy one_accuracy_low"} <= logged
    card = (tmp_path / "README.md").read_text()
    assert "### easy one" in card and "### hard" in card
    assert not list(tmp_path.glob("*.png")), "no pictures during training"


def test_unusable_group_column_is_named_before_loading(tmp_path: Path) -> None:
    by_length = {"train_sampling_strategy": "group_by_length", "packing": False}
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (labeled(4), "origin", {}),
        (labeled(4).to_iterable_dataset(), "eval_by", {}),
        (labeled(4), "group_by_length", by_length),
    ]
    for eval_dataset, message, settings in cases:
        with pytest.raises(UserError, match=message):
            make_trainer("no-such-model", tmp_path, eval_dataset, eval_by="origin", **settings)


def test_groups_need_a_column_and_the_datasets_order(model_folder: str, tmp_path: Path, caplog: Any) -> None:
    trainer = make_trainer(model_folder, tmp_path, labeled(6), eval_by="source")
    others = tiny.made_up_pairs(202)
    expected = make_trainer(model_folder, tmp_path).predict(others.select(range(4))).metrics
    assert trainer.predict(others.select(range(4))).metrics.keys() == expected.keys()
    assert caplog.text.count("eval_by='source'") == 1
    many = others.add_column("source", [str(row) for row in range(202)])
    assert "eval_accuracy/7" not in trainer.evaluate(many) and "202" in caplog.text

    class Reversed(RewardTrainer):
        def _get_eval_sampler(self, eval_dataset: Any) -> Any:
            return range(len(eval_dataset) - 1, -1, -1)

    metrics = make_trainer(model_folder, tmp_path, labeled(6), kind=Reversed, eval_by="source").evaluate()
    assert "eval_ece" in metrics and "eval_accuracy/web" not in metrics and "eval_length_only_accuracy" not in metrics
    assert caplog.text.count("eval_by='source'") > 1


def test_nonfinite_rewards_have_no_verdict(model_folder: str, tmp_path: Path) -> None:
    trainer = make_trainer(model_folder, tmp_path, labeled(4))
    trainer.model.score.weight.data.fill_(math.nan)
    metrics = trainer.evaluate()
    assert math.isnan(metrics["eval_margin"]) and "eval_ece" not in metrics
