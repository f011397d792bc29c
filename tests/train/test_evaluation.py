"""Evaluation and prediction: every pair once, in order, under its own name; against the model called directly."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EvalPrediction

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.config.reward_config import METRICS
from trl_tpu.errors import UserError
from trl_tpu.training.step import EvaluatedPairs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    pairs = tiny.made_up_pairs(100)
    return tiny.save_tiny(tmp_path_factory.mktemp("model"), [*pairs["prompt"], *pairs["chosen"], *pairs["rejected"]])


def make_trainer(folder: str, out: Path, **settings: Any) -> RewardTrainer:
    arguments = {name: settings.pop(name) for name in ("eval_dataset", "compute_metrics") if name in settings}
    defaults = {"per_device_eval_batch_size": 4, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = RewardConfig(str(out), **(defaults | settings))
    return RewardTrainer(folder, args, train_dataset=tiny.made_up_pairs(16), **arguments)


def rewards_one_by_one(folder: str, pairs: Dataset) -> torch.Tensor:
    """[pairs, 2]: each dialogue alone, unpadded, through the model as transformers loads it; in float64."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        rewards = [
            model(**tokenizer(row["prompt"] + row[half] + "<eos>", return_tensors="pt")).logits.item()
            for row in pairs
            for half in ("chosen", "rejected")
        ]
    return torch.tensor(rewards, dtype=torch.float64).view(-1, 2)


def test_evaluate_equals_a_float64_computation_over_all_pairs(folder: str, tmp_path: Path) -> None:
    """11 pairs in batches of 4: the short last batch weighs as much as its 3 pairs."""
    pairs = tiny.made_up_pairs(11, seed=3, margin=True)
    metrics = make_trainer(folder, tmp_path).evaluate(pairs)
    rewards_N2 = rewards_one_by_one(folder, pairs)
    difference_N = rewards_N2[:, 0] - rewards_N2[:, 1]
    expected = {
        "loss": -logsigmoid(difference_N - torch.tensor(pairs["margin"])).mean(),
        "accuracy": (difference_N > 0).double().mean(),
        "margin": difference_N.mean(),
        "min_reward": rewards_N2.min(),
        "mean_reward": rewards_N2.mean(),
        "max_reward": rewards_N2.max(),
        "tie_rate": 0.0,
    }
    for name, value in expected.items():
        assert metrics[f"eval_{name}"] == pytest.approx(float(value), abs=1e-6), name  # float32 rewards
    # every rejected answer is the longer one, so there is no accuracy where length cannot help
    logged = {f"eval_{name}" for name in (*METRICS, "length_only_accuracy")}
    assert metrics.keys() - {"epoch", "eval_model_preparation_time"} == logged
    assert metrics["eval_length_only_accuracy"] == 1.0


def test_predict_gives_the_rewards_of_raw_pairs_in_order(folder: str, tmp_path: Path) -> None:
    pairs = tiny.made_up_pairs(17, seed=4)
    output = make_trainer(folder, tmp_path).predict(pairs)
    assert output.predictions.shape == (17, 2)
    np.testing.assert_allclose(output.predictions, rewards_one_by_one(folder, pairs).numpy(), atol=1e-6)
    assert output.label_ids.tolist() == [0] * 17
    assert output.metrics["test_accuracy"] == float((output.predictions[:, 0] > output.predictions[:, 1]).mean())


def test_each_evaluation_set_keeps_its_name(folder: str, tmp_path: Path) -> None:
    sets = {"easy": tiny.made_up_pairs(6, seed=5), "hard": tiny.made_up_pairs(9, seed=6)}
    trainer = make_trainer(folder, tmp_path, eval_dataset=sets)
    metrics = trainer.evaluate()
    assert "eval_accuracy" not in metrics
    for name, pairs in sets.items():
        rewards_N2 = rewards_one_by_one(folder, pairs)
        accuracy = (rewards_N2[:, 0] > rewards_N2[:, 1]).double().mean()
        assert metrics[f"eval_{name}_accuracy"] == pytest.approx(float(accuracy))
        assert metrics[f"eval_{name}_mean_reward"] == pytest.approx(float(rewards_N2.mean()), abs=1e-6)


def test_batch_eval_metrics_sees_each_batch_once(folder: str, tmp_path: Path) -> None:
    sizes: list[int] = []

    def count_pairs(prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        sizes.append(len(prediction.predictions))
        return {"pairs": sum(sizes)} if compute_result else {}

    trainer = make_trainer(folder, tmp_path, compute_metrics=count_pairs, batch_eval_metrics=True)
    pairs = tiny.made_up_pairs(10)
    for data in (pairs, pairs.to_iterable_dataset()):  # a stream does not know how many it has
        sizes.clear()
        metrics = trainer.evaluate(data, metric_key_prefix="held_out")
        assert sizes == [4, 4, 2] and metrics["held_out_pairs"] == 10
        assert all(key.startswith("held_out_") for key in metrics if key != "epoch")


def test_only_the_loss_where_that_is_asked_for(folder: str, tmp_path: Path) -> None:
    def fail(prediction: EvalPrediction) -> dict[str, float]:
        raise AssertionError("compute_metrics got predictions")

    pairs = tiny.made_up_pairs(6)
    whole = make_trainer(folder, tmp_path).evaluate(pairs)
    trainer = make_trainer(folder, tmp_path, compute_metrics=fail, prediction_loss_only=True)
    assert trainer.evaluate(pairs)["eval_loss"] == whole["eval_loss"]
    output = trainer.predict(pairs)
    assert len(output.predictions) == 0 and output.metrics["test_loss"] == whole["eval_loss"]


PROBABLE = tiny.made_up_pairs(9, seed=5).add_column("chosen_probability", [0.1, 0.9, 0.5] * 3)


def mean_loss(prediction: EvalPrediction) -> dict[str, float]:
    return {"mean_of_losses": float(np.mean(prediction.losses))}


@pytest.mark.parametrize("average_over", ["prompts", "comparisons"])
def test_the_losses_of_compute_metrics_average_to_the_loss(folder: str, tmp_path: Path, average_over: str) -> None:
    class Doubled(RewardTrainer):
        def compute_loss(self, *args: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(*args, return_outputs=True, **more)
            return (2 * loss, outputs) if return_outputs else 2 * loss

    rankings = tiny.made_up_rankings(7)
    settings = {"include_for_metrics": ["loss"], "average_over": average_over, "per_device_eval_batch_size": 4}
    for kind in (RewardTrainer, Doubled):
        args = RewardConfig(str(tmp_path), report_to="none", **settings)
        trainer = kind(folder, args, train_dataset=rankings, eval_dataset=rankings, compute_metrics=mean_loss)
        metrics = trainer.evaluate()
        assert metrics["eval_mean_of_losses"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


def test_metrics_of_pairs_with_probabilities_follow_the_more_probable_answer(folder: str, tmp_path: Path) -> None:
    trainer = make_trainer(folder, tmp_path)
    metrics, (chosen_N, rejected_N) = trainer.evaluate(PROBABLE), trainer.predict(PROBABLE).predictions.T
    probability_N = np.array(PROBABLE["chosen_probability"])
    margins_M = ((chosen_N - rejected_N) * np.sign(probability_N - 0.5))[probability_N != 0.5]
    assert metrics["eval_accuracy"] == pytest.approx(np.mean(margins_M > 0))
    assert metrics["eval_margin"] == pytest.approx(np.mean(margins_M), abs=1e-6)
    assert trainer.verdicts["eval"].accuracy.value == metrics["eval_accuracy"]
    assert trainer.verdicts["eval"].pairs == 6 and "eval_kendall_tau" not in metrics


def test_batches_move_to_the_host_as_often_as_asked(folder: str, tmp_path: Path) -> None:
    pairs, fetched = tiny.made_up_pairs(19), []
    for steps in (None, 2):
        trainer = make_trainer(folder, tmp_path, eval_dataset=pairs, eval_accumulation_steps=steps)
        with patch.object(
            EvaluatedPairs, "_move_to_host", autospec=True, side_effect=EvaluatedPairs._move_to_host
        ) as f:
            metrics = trainer.evaluate()
        fetched.append((f.call_count, {name: value for name, value in metrics.items() if "_per_" not in name}))
    assert [count for count, _ in fetched] == [1, 3]  # of 5 batches
    assert fetched[0][1]["eval_loss"] == fetched[1][1]["eval_loss"]


NOTHING_COMPARED: list[tuple[Any, dict[str, Any]]] = [
    (tiny.made_up_rankings(5).map(lambda row: {"scores": [1.0] * len(row["scores"])}), {"loss_type": "regression"}),
    (tiny.made_up_rankings(5).map(lambda row: {"scores": [1.0] * len(row["scores"])}), {"ties": "davidson"}),
    (tiny.made_up_pairs(5).add_column("chosen_probability", [0.5] * 5), {}),
]


@pytest.mark.parametrize(("data", "settings"), NOTHING_COMPARED)
def test_training_goes_on_after_an_evaluation_that_compares_nothing(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, data: Any, settings: dict[str, Any]
) -> None:
    args = RewardConfig(
        str(tmp_path),
        report_to="none",
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        **settings,
    )
    train = tiny.made_up_rankings(8) if "scores" in data.column_names else tiny.made_up_pairs(8)
    trainer = RewardTrainer(folder, args, train_dataset=train, eval_dataset=data)
    trainer.train()
    evaluated = [log for log in trainer.state.log_history if "eval_loss" in log]
    assert len(evaluated) == 2 and all("eval_mean_reward" in log and "eval_accuracy" not in log for log in evaluated)
    assert caplog.text.count("no accuracy") == 2 and "eval" not in trainer.verdicts


CARDS: list[tuple[Any, dict[str, Any], list[str], list[str]]] = [
    (tiny.made_up_pairs(8), {}, ["Bradley and Terry", "Nothing was truncated", "on pairs"], ["- margin)`"]),
    (tiny.made_up_pairs(8, margin=True), {"truncation_mode": "keep_end"}, ["- margin)`", "truncated: the last"], []),
    (
        tiny.made_up_pairs(8).add_column("chosen_probability", [0.7] * 8),
        {"center_rewards_coefficient": 0.01, "label_smoothing": 0.1},
        ["`chosen_probability`", "0.01 times", "smoothed by 0.1"],
        [],
    ),
    (tiny.made_up_rankings(8), {"loss_type": "regression"}, ["squared error"], ["Bradley"]),
    (tiny.made_up_rankings(8), {"loss_type": "plackett_luce"}, ["Plackett", "prompt counts once"], ["Bradley"]),
    (tiny.made_up_rankings(8), {"ties": "davidson", "average_over": "comparisons"}, ["Davidson"], ["Bradley"]),
    (tiny.made_up_rankings(8), {"ties": "rao_kupper"}, ["Rao and Kupper"], ["Bradley"]),
    (tiny.made_up_rankings(8), {"margin_scale": 0.5}, ["Ouyang", "times 0.5"], ["on pairs"]),
]


@pytest.mark.parametrize(("data", "settings", "stated", "absent"), CARDS)
def test_the_card_states_the_loss_and_truncation(
    folder: str, tmp_path: Path, data: Any, settings: dict[str, Any], stated: list[str], absent: list[str]
) -> None:
    args = RewardConfig(str(tmp_path), report_to="none", **settings)
    trainer = RewardTrainer(folder, args, train_dataset=data, eval_dataset=data)
    trainer.evaluate()
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert [words for words in stated if words not in card] + [words for words in absent if words in card] == []
    assert ("Nothing was truncated" in card) is ("truncation_mode" not in settings)
    prompts = len(set(data["prompt"]))
    assert f"{prompts} of {prompts} evaluation prompts also occur in the training data." in card


BEST: list[tuple[Any, dict[str, Any], list[str], list[str]]] = [
    (tiny.made_up_rankings(8), {}, ["kendall_tau", "eval_top1_accuracy", "accuracy"], ["nonsense", "accuracy/a"]),
    (tiny.made_up_pairs(8), {"eval_by": "prompt"}, ["accuracy/{prompt}"], ["kendall_tau", "accuracy/typo"]),
    (NOTHING_COMPARED[0][0], {"loss_type": "regression"}, ["loss", "mean_reward"], ["accuracy"]),
]


@pytest.mark.parametrize(("data", "settings", "measured", "others"), BEST)
def test_the_metric_for_the_best_model_is_one_that_is_measured(
    folder: str, tmp_path: Path, data: Any, settings: dict[str, Any], measured: list[str], others: list[str]
) -> None:
    def make(name: str) -> RewardTrainer:
        best = {"metric_for_best_model": name.format(prompt=data["prompt"][0]), "eval_strategy": "epoch"}
        args = RewardConfig(str(tmp_path), report_to="none", **best, **settings)
        return RewardTrainer(folder, args, train_dataset=data, eval_dataset=data)

    for name in measured:
        assert f"eval_{name.removeprefix('eval_').format(prompt=data['prompt'][0])}" in make(name).evaluate()
    for name in others:
        with pytest.raises(UserError, match="metric_for_best_model"):
            make(name)


def test_a_tracker_that_is_not_installed_is_named_at_once(tmp_path: Path) -> None:
    with (
        patch("trl_tpu.config.checks.get_available_reporting_integrations", lambda: ["tensorboard"]),
        pytest.raises(UserError, match="report_to.*wandb"),
    ):
        RewardConfig(str(tmp_path), report_to=["tensorboard", "wandb"])


def test_an_evaluation_after_training_counts_the_tokens_since_the_last_log(folder: str, tmp_path: Path) -> None:
    counts = []
    for logging_steps in (1, 2):
        trainer = make_trainer(folder, tmp_path, max_steps=3, logging_steps=logging_steps)
        trainer.train()
        counts.append(trainer.evaluate(tiny.made_up_pairs(8))["eval_num_tokens"])
    assert counts[0] == counts[1] > 0
