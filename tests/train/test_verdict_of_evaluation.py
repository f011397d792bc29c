"""An evaluation's verdict: logged beside TRL's metrics, by label, and written beside the model."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import tiny
from datasets import Dataset
from scipy.stats import binomtest

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.errors import UserError
from trl_tpu.evaluation.judge import check_eval_by
from trl_tpu.report.page import read_run

LABELS = ["web", "book", None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    pairs = tiny.made_up_pairs(100)
    return tiny.save_tiny(tmp_path_factory.mktemp("model"), [*pairs["prompt"], *pairs["chosen"], *pairs["rejected"]])


def labeled(count: int, seed: int = 3) -> Dataset:
    """Pairs of which every third has the chosen answer longer, with the label of their source."""
    rows: Any = tiny.made_up_pairs(count, seed=seed).to_list()
    for number, row in enumerate(rows):
        row["source"] = LABELS[number % 3]
        if number % 3 == 0:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    return Dataset.from_list(rows)


def make_trainer(folder: str, out: Path, eval_dataset: Any = None, **settings: Any) -> RewardTrainer:
    defaults = {"per_device_eval_batch_size": 4, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = RewardConfig(str(out), **(defaults | settings))
    return RewardTrainer(folder, args, train_dataset=tiny.made_up_pairs(16), eval_dataset=eval_dataset)


@pytest.mark.parametrize("packing", [False, "auto"])
def test_evaluation_logs_the_verdict_with_the_accuracy_of_each_label(
    folder: str, tmp_path: Path, packing: str | bool
) -> None:
    pairs = labeled(26)
    trainer = make_trainer(folder, tmp_path, pairs, eval_by="source", packing=packing)
    metrics = trainer.evaluate()
    rewards_N2 = trainer.predict(pairs).predictions.astype(float)
    right_N = rewards_N2[:, 0] > rewards_N2[:, 1]
    for start, label in enumerate(("web", "book", "none")):
        assert metrics[f"eval_accuracy/{label}"] == pytest.approx(right_N[start::3].mean())
    assert metrics["eval_mean_accuracy_over_groups"] == pytest.approx(
        np.mean([right_N[n::3].mean() for n in range(3)])
    )
    interval = binomtest(int(right_N.sum()), 26).proportion_ci(0.95, method="wilson")
    assert (metrics["eval_accuracy_low"], metrics["eval_accuracy_high"]) == pytest.approx(
        (interval.low, interval.high)
    )
    assert metrics["eval_brier"] == pytest.approx(
        np.mean((1 - 1 / (1 + np.exp(rewards_N2[:, 1] - rewards_N2[:, 0]))) ** 2)
    )
    tokenizer = trainer.processing_class
    longer_N = np.array(
        [len(tokenizer(r["chosen"]).input_ids) - len(tokenizer(r["rejected"]).input_ids) for r in pairs]
    )
    assert metrics["eval_length_only_accuracy"] == pytest.approx(max((longer_N > 0).mean(), (longer_N < 0).mean()))
    expected = (right_N[longer_N > 0].mean() + right_N[longer_N < 0].mean()) / 2
    assert metrics["eval_length_controlled_accuracy"] == pytest.approx(expected)
    assert metrics["eval_accuracy"] == pytest.approx(right_N.mean()), "TRL's own stay as they were"


def test_a_verdict_and_its_pictures_are_beside_the_model_and_in_its_card(folder: str, tmp_path: Path) -> None:
    hostile = labeled(12).map(lambda row: {"source": f"<b>|{row['source']}`"})
    trainer = make_trainer(folder, tmp_path, hostile, eval_by="source")
    metrics = trainer.evaluate()
    trainer.create_model_card()
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["accuracy"]["value"] == metrics["eval_accuracy"]
    card = (tmp_path / "README.md").read_text()
    assert card.index("## Evaluation") < card.index("## Training procedure")
    assert f"{metrics['eval_accuracy']:.4f} ({metrics['eval_accuracy_low']:.3f} to" in card
    assert "<b>" not in card and "&lt;b>" in card and "pypi" not in card
    for name in ("verdict_margins.png", "verdict_reliability.png"):
        assert f"]({name})" in card and (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_has_the_verdict_of_the_evaluation_before_it_and_each_dataset_its_own(
    folder: str, tmp_path: Path
) -> None:
    sets = {"easy one": labeled(6), "hard": labeled(9, seed=6)}
    schedule: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    trainer = make_trainer(folder, tmp_path, sets, save_steps=2, **schedule)
    trainer.train()
    found = read_run(tmp_path, "run")
    assert {name: each.pairs for name, each in found.verdicts.items()} == {"run: easy one": 6, "run: hard": 9}  # type: ignore[union-attr]
    assert list(found.evaluated("accuracy")) == ["easy one", "hard"]
    assert {"eval_hard_ece", "eval_easy one_accuracy_low"} <= trainer.state.log_history[-1].keys() | {
        key for record in trainer.state.log_history for key in record
    }
    card = (tmp_path / "README.md").read_text()
    assert "### easy one" in card and "### hard" in card
    assert not list(tmp_path.glob("*.png")), "training does not wait for pictures"


def test_the_best_model_may_be_the_one_that_is_calibrated_best(folder: str, tmp_path: Path) -> None:
    schedule: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    for name in ("eval_ece", "brier", "length_controlled_accuracy", "eval_accuracy/web"):
        trainer = make_trainer(folder, tmp_path, labeled(6), eval_by="source", metric_for_best_model=name, **schedule)
        assert trainer.args.greater_is_better is ("accuracy" in name)
    with pytest.raises(UserError, match="metric_for_best_model='eval_accuracy/web' is not measured"):
        make_trainer(folder, tmp_path, labeled(6), metric_for_best_model="eval_accuracy/web", **schedule)


def test_a_column_that_cannot_group_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    many = Dataset.from_list([row | {"origin": number} for number, row in enumerate(labeled(201))])
    cases: list[tuple[Any, str]] = [
        (labeled(4), "eval_by='origin' names no column of the evaluation data, whose columns are prompt, "),
        (many, "201 groups are too many"),
        (many.to_iterable_dataset(), "not a stream"),
    ]
    for eval_dataset, message in cases:
        with pytest.raises(UserError, match=message):
            make_trainer("no-such-model", tmp_path, eval_dataset, eval_by="origin")
    args = create_autospec(RewardConfig, instance=True, eval_by="origin", train_sampling_strategy="group_by_length")
    with pytest.raises(UserError, match="eval_by needs pairs in the order of the evaluation data"):
        check_eval_by(args, many)


def test_another_dataset_without_the_column_and_a_loader_of_ones_own_go_without_groups(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(folder, tmp_path, labeled(6), eval_by="source")
    others = tiny.made_up_pairs(202)
    expected = make_trainer(folder, tmp_path).predict(others.select(range(4))).metrics
    assert trainer.predict(others.select(range(4))).metrics.keys() == expected.keys()
    assert caplog.text.count("The metrics are without groups. eval_by='source' names no column") == 1
    many = others.add_column("source", [str(row) for row in range(202)])
    assert "eval_accuracy/7" not in trainer.evaluate(many) and "202 groups are too many" in caplog.text

    class Reversed(RewardTrainer):
        def _get_eval_sampler(self, eval_dataset: Any) -> Any:
            return range(len(eval_dataset) - 1, -1, -1)

    args = RewardConfig(str(tmp_path), report_to="none", eval_by="source", save_strategy="no")
    own = Reversed(folder, args, train_dataset=tiny.made_up_pairs(16), eval_dataset=labeled(6))
    metrics = own.evaluate()
    assert "eval_ece" in metrics and "eval_accuracy/web" not in metrics and "eval_length_only_accuracy" not in metrics
    assert "eval_by='source' is left out" in caplog.text


def test_rewards_that_are_not_finite_have_no_verdict(folder: str, tmp_path: Path) -> None:
    trainer = make_trainer(folder, tmp_path, labeled(4))
    trainer.model.score.weight.data.fill_(math.nan)
    metrics = trainer.evaluate()
    assert math.isnan(metrics["eval_margin"]) and "eval_ece" not in metrics
