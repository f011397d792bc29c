"""Evaluation and prediction: every pair once, in order, under its own name; against the model called directly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EvalPrediction

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.config.metric_names import METRICS


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
