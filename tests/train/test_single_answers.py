"""Single answers with labels: the loss is the cross-entropy with the label, packed and padded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from label_formats import LABEL_FORMATS, answers
from training import QUIET, losses, trained, untimed
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl_tpu import RewardConfig, RewardTrainer, score
from trl_tpu.errors import UserError


def run_of(model: str, out: Path, rows: Dataset, **more: Any) -> RewardTrainer:
    settings = QUIET | {"save_strategy": "no", "logging_steps": 1, "max_steps": 4, "learning_rate": 1e-3}
    settings |= {"per_device_train_batch_size": 6, "train_sampling_strategy": "sequential"}
    args = RewardConfig(str(out), **settings | more)
    return trained(RewardTrainer(model, args, train_dataset=rows, eval_dataset=answers(20, seed=1)))


def rewards_of(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    """Return the rewards of transformers' model, one answer at a time."""
    texts = [row["prompt"] + row["completion"] + tokenizer.eos_token for row in rows]
    return torch.cat([model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0] for text in texts])


@pytest.mark.parametrize("loss", ["sigmoid", "regression"])
def test_losses_equal_the_formula(model_folder: str, tmp_path: Path, loss: str) -> None:
    rows = answers(24).to_list()
    if loss == "regression":  # labels of any range
        rows = [{"prompt": row["prompt"], "completion": row["completion"], "score": 3 * row["label"]} for row in rows]
    data = Dataset.from_list(rows)
    runs = [run_of(model_folder, tmp_path, data, loss_type=loss, packing=each) for each in (True, False)]
    for one, two in zip(*(run.state.log_history[:-1] for run in runs), strict=True):
        assert untimed(one) == pytest.approx(untimed(two), abs=1e-5)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    first = rewards_of(model, AutoTokenizer.from_pretrained(model_folder), rows[:6])
    labels = torch.tensor([row["score" if loss == "regression" else "label"] for row in rows[:6]])
    if loss == "regression":
        expected = (first - labels).square().mean()
    else:
        expected = torch.nn.functional.binary_cross_entropy_with_logits(first, labels)
        right = ((first > 0) == (labels > 0.5)).float().mean()
        assert runs[0].state.log_history[0]["accuracy"] == pytest.approx(right)
    assert losses(runs[0])[0] == pytest.approx(expected.item(), abs=1e-6)


def test_labeled_answers_are_evaluated_and_scored(model_folder: str, tmp_path: Path) -> None:
    trainer = run_of(model_folder, tmp_path, answers(60), max_steps=100, eval_by="prompt")
    assert sum(losses(trainer)[-10:]) < 0.9 * sum(losses(trainer)[:10])
    metrics = trainer.evaluate()
    rows = answers(20, seed=1)
    predictions = trainer.predict(rows).predictions
    trainer.save_model()
    rewards = [row["rewards"][0] for row in score(str(tmp_path), rows.to_list())]
    np.testing.assert_allclose(predictions[:, 0], rewards, atol=1e-5)
    right = [(reward > 0) == (label > 0.5) for reward, label in zip(rewards, rows["label"], strict=True)]
    assert metrics["eval_accuracy"] == pytest.approx(np.mean(right))


def test_rewards_that_predict_scores_have_errors_and_no_accuracy(model_folder: str, tmp_path: Path) -> None:
    """A penalty counts every answer; the labels of `predict` are the scores; a score counts where a row has both."""
    rows = answers(12).map(lambda row, at: {"score": at % 6 - 1.0}, with_indices=True)
    settings: dict[str, Any] = {"loss_type": "regression", "center_rewards_coefficient": 0.5, "learning_rate": 0.0}
    trainer = run_of(model_folder, tmp_path, rows, **settings, save_strategy="no")
    metrics, predicted = trainer.evaluate(rows), trainer.predict(rows)
    rewards, scores = predicted.predictions.astype(float), np.array(rows["score"])[:, None]
    np.testing.assert_array_equal(predicted.label_ids, scores)
    error = ((rewards - scores) ** 2).mean()
    expected = {"loss": error + 0.5 * (rewards**2).mean(), "squared_error": error}
    expected["correlation"] = np.corrcoef(rewards.ravel(), scores.ravel())[0, 1]
    assert {name: metrics[f"eval_{name}"] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert not {"eval_accuracy", "eval_ece", "eval_margin"} & metrics.keys()
    assert "accuracy" not in trainer.state.log_history[0]


IMPOSSIBLE = [
    ({"label": 3}, "loss_type"),
    ({"settings": {"ties": "skip"}}, "ties"),
    ({"completions": ["a", "b"]}, "1 as"),
]


@pytest.mark.parametrize(("change", "named"), IMPOSSIBLE, ids=str)
def test_impossible_cases_are_rejected(model_folder: str, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    rows = LABEL_FORMATS["answers"].rows(4).to_list()
    settings = change.pop("settings", {})
    if "completions" in change:
        rows = [{"prompt": "a", "completions": ["b"], "scores": [1.0]}]
        change["scores"] = [0.0, 1.0]
    rows.append({**rows[0], **change})
    with pytest.raises(UserError, match=named):
        run_of(model_folder, tmp_path, Dataset.from_list(rows), **settings)
