"""Training on rankings, attributes and single answers: packed training equals padded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from label_formats import LABEL_FORMATS, NAMES, WEIGHTS, answers, graded
from peft import AutoPeftModelForSequenceClassification, LoraConfig
from tiny import made_up_rankings as rankings
from training import QUIET, losses, trained, untimed
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl_tpu import RewardConfig, RewardTrainer, score
from trl_tpu.checkpoint.export import export_checkpoint
from trl_tpu.compat.old_trl import RewardDataCollatorWithPadding
from trl_tpu.errors import UserError
from trl_tpu.packing.shapes import BatchShape, ShapePlan

LISTWISE_LOSSES: list[dict[str, Any]] = [
    {"margin_scale": 0.3, "label_smoothing": 0.1, "center_rewards_coefficient": 0.1},
    {"loss_type": "plackett_luce", "ranking_top_k": 2},
    {"loss_type": "regression"},
    {"ties": "davidson", "tie_threshold": 0.5, "average_over": "comparisons"},
]
OF_ATTRIBUTES = [{"margin_scale": 0.1, "attribute_loss_weights": [1.0, 2.0, 0.5]}, {"loss_type": "plackett_luce"}]
CASES = [*(("ranked", each) for each in LISTWISE_LOSSES), *(("attributes", each) for each in OF_ATTRIBUTES)]


class FixedRows(RewardTrainer):
    fixed_shapes = ShapePlan((BatchShape(1, 96),), (BatchShape(1, 128),))  # most batches need several


def run_of(model: str, out: Path, form: str, kind: type = RewardTrainer, **more: Any) -> RewardTrainer:
    """Train on rows of a format; the last 7 rows are held out."""
    own, rows = LABEL_FORMATS[form], LABEL_FORMATS[form].rows(30)
    settings = QUIET | {"save_strategy": "no", "logging_steps": 1, "max_steps": 6, "learning_rate": 1e-3}
    args = RewardConfig(str(out), **settings | {"per_device_train_batch_size": 5} | own.settings | more)
    first = len(rows) - 7
    given = {"train_dataset": rows.select(range(first)), "eval_dataset": rows.select(range(first, len(rows)))}
    return trained(kind(own.model(model), args, **given, processing_class=AutoTokenizer.from_pretrained(model)))


@pytest.mark.parametrize(("form", "loss"), CASES)
def test_packed_training_equals_padded(model_folder: str, tmp_path: Path, form: str, loss: dict[str, Any]) -> None:
    kinds = {"padded": RewardTrainer, "tight": RewardTrainer, "micro-batches": FixedRows}
    runs = [run_of(model_folder, tmp_path, form, kind, packing=way != "padded", **loss) for way, kind in kinds.items()]
    padded, *others = (
        [*(untimed(log) for log in run.state.log_history if "loss" in log), untimed(run.evaluate())] for run in runs
    )
    rows = LABEL_FORMATS[form].rows(34).select(range(30, 34))
    of_padded, *predicted = (run.predict(rows).predictions for run in runs)
    for logs, rewards in zip(others, predicted, strict=True):
        for one, two in zip(padded, logs, strict=True):
            assert two == pytest.approx(one, abs=2e-5)
        assert rewards == pytest.approx(of_padded, abs=2e-5, nan_ok=True)
    assert of_padded.shape[:2] == ((4, 3) if form == "attributes" else (4, 4))
    (batch,) = runs[1].get_eval_dataloader(rows)
    _, outputs = runs[1].compute_loss(runs[1].model, batch, return_outputs=True)
    exists = ~np.isnan(of_padded)
    assert outputs["rewards"].detach().numpy()[exists] == pytest.approx(of_padded[exists], abs=2e-5)
    assert padded[0]["num_tokens"] > 0 and {"eval_kendall_tau", "eval_accuracy"} <= padded[-1].keys()


@pytest.mark.parametrize("loss", LISTWISE_LOSSES)
def test_ranking_settings_are_rejected_for_pairs(model_folder: str, tmp_path: Path, loss: dict[str, Any]) -> None:
    config = RewardConfig(str(tmp_path), report_to="none", bf16=False, max_steps=1, **loss)
    pairs = tiny.made_up_pairs(4)
    for train, evaluated in ((pairs, None), (pairs.to_iterable_dataset(), None), (rankings(4), pairs)):
        with pytest.raises(UserError, match=next(iter(loss))):
            RewardTrainer(model_folder, config, train_dataset=train, eval_dataset=evaluated)


def test_old_collator_rejects_ranking_settings(model_folder: str, tmp_path: Path) -> None:
    config = RewardConfig(str(tmp_path), report_to="none", bf16=False, max_steps=1, margin_scale=0.5)
    old = RewardDataCollatorWithPadding(tiny.tiny_tokenizer(["a"]))
    with pytest.raises(UserError, match="margin_scale"), pytest.warns(FutureWarning):
        RewardTrainer(model_folder, config, old, train_dataset=tiny.made_up_pairs(4))


# ---- several attributes: the saved model gives one reward and keeps attribute names


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_tiny(tmp_path_factory.mktemp("model"), graded(20), num_labels=3)


def train_attributes(model: str, out: Path, peft_config: Any = None, **settings: Any) -> RewardTrainer:
    defaults = QUIET | {"save_strategy": "no", "max_steps": 4, "learning_rate": 1e-3, "ties": "skip"}
    defaults |= {"per_device_train_batch_size": 5, "attributes": NAMES, "attribute_weights": WEIGHTS}
    data = {"train_dataset": graded(23), "eval_dataset": graded(7, seed=3)}
    trainer = RewardTrainer(model, RewardConfig(str(out), **defaults | settings), **data, peft_config=peft_config)
    trainer.train()
    return trainer


@pytest.mark.parametrize("peft", [None, LoraConfig(task_type="SEQ_CLS", r=2)])
def test_saved_model_gives_one_reward(model: str, tmp_path: Path, peft: Any) -> None:
    run = train_attributes(model, tmp_path / "run", peft_config=peft, save_strategy="steps", save_steps=4)
    saved, rows = tmp_path / "run" / "checkpoint-4", list(graded(5, seed=1))
    texts = [row["prompt"] + text for row in rows for text in row["completions"]]
    run.save_model(str(tmp_path / "saved"))
    scored = list(score(str(tmp_path / "saved"), rows))
    found = [reward for row in scored for reward in row["rewards"]]
    for source, out in ((saved, "of-checkpoint"), (tmp_path / "saved", "of-model")):
        export_checkpoint(source, tmp_path / out, merge=peft is not None)
        assert tiny.rewards_alone(tmp_path / out, texts) == pytest.approx(found, abs=2e-6)
    by_name = [each for row in scored for each in row["rewards_by_attribute"]]
    assert [list(each) for each in by_name] == [NAMES] * len(texts)
    assert [np.dot(WEIGHTS, list(each.values())) for each in by_name] == pytest.approx(found)
    assert np.std(found) > 0 and "0.65" in Path(run.args.output_dir, "README.md").read_text()


@pytest.mark.parametrize("lora", [None, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])])
def test_further_training_matches_attributes_by_name(model: str, tmp_path: Path, lora: Any) -> None:
    """Names come in another order. Adapters are loaded by their folder and by peft."""
    first = train_attributes(model, tmp_path / "first", peft_config=lora, save_strategy="steps", save_steps=2)
    first.save_model()
    folder, before = str(tmp_path / "first"), first.evaluate()
    tokenizer = first.processing_class
    names = [NAMES[2], NAMES[0], NAMES[1]]
    auto: Any = AutoModelForSequenceClassification if lora is None else AutoPeftModelForSequenceClassification
    settings = QUIET | {"ties": "skip"}
    settings |= {"attributes": names, "attribute_loss_weights": [3.0, 1.0, 2.0]}
    args = RewardConfig(str(tmp_path / "again"), **settings)
    for given in (folder, auto.from_pretrained(folder, num_labels=3)):
        data = {"train_dataset": graded(23), "eval_dataset": graded(7, seed=3)}
        again = RewardTrainer(given, args, **data, processing_class=tokenizer)
        config = again.model.config
        assert (config.attribute_weights, [*config.id2label.values()]) == (WEIGHTS, NAMES)
        assert again.args.attribute_loss_weights == [1.0, 2.0, 3.0] and args.attributes == names
        metrics = again.evaluate()
        for key in (key for key in before if "accuracy" in key):
            assert metrics[key] == pytest.approx(before[key], abs=1e-6), key
    args.attributes = [*NAMES[:2], "other"]
    with pytest.raises(UserError, match="attributes"):
        RewardTrainer(folder, args, **data, processing_class=tokenizer)
    resumed = {"attributes": names, "attribute_weights": None, "max_steps": 6}
    with pytest.raises(UserError, match="attributes"):
        RewardTrainer(
            model, RewardConfig(str(tmp_path / "new"), **settings | resumed), **data, peft_config=lora
        ).train(f"{folder}/checkpoint-2")


# ---- single answers: the loss is the cross-entropy with the label


def run_of_answers(model: str, out: Path, rows: Dataset, **more: Any) -> RewardTrainer:
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
    runs = [run_of_answers(model_folder, tmp_path, data, loss_type=loss, packing=each) for each in (True, False)]
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
    trainer = run_of_answers(model_folder, tmp_path, answers(60), max_steps=100, eval_by="prompt")
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
    trainer = run_of_answers(model_folder, tmp_path, rows, **settings, save_strategy="no")
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
        run_of_answers(model_folder, tmp_path, Dataset.from_list(rows), **settings)
