"""Training on rankings and attributes: packed equals padded in every layout, and a known order is learned."""

import random
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from datasets import Dataset
from label_formats import LABEL_FORMATS
from tiny import made_up_rankings as rankings
from training import QUIET, trained, untimed
from transformers import AutoTokenizer

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.compat.old_columns import RewardDataCollatorWithPadding
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


def run_of(
    model: str, out: Path, form: str = "ranked", kind: type = RewardTrainer, data: Any = None, **more: Any
) -> RewardTrainer:
    """Train on rows of a format; the last 7 rows are held out."""
    own, rows = LABEL_FORMATS[form], LABEL_FORMATS[form].rows(30) if data is None else data
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


WORDS = [consonant + vowel for consonant in "bdfgkl" for vowel in "aeio"]
WORD_VALUES = dict(zip(random.Random(7).sample(WORDS, len(WORDS)), range(len(WORDS)), strict=True))


def word_rankings(count: int, seed: int) -> Dataset:
    """Return prompts of 16 words with 8 answers of two words; an answer's score is the sum of its words' values."""
    chooser, rows = random.Random(seed), []
    for _ in range(count):
        answers: dict[int, str] = {}
        while len(answers) < 8:
            first, second = chooser.sample(WORDS, 2)
            answers[WORD_VALUES[first] + WORD_VALUES[second]] = f" {first} {second}"
        scores = chooser.sample(sorted(answers), 8)
        rows.append({"prompt": " ".join(chooser.choices(WORDS, k=16)), "completions": [*map(answers.get, scores)]})
        rows[-1]["scores"] = [float(score) for score in scores]
    return Dataset.from_list(rows)


def as_pairs(ranked: Dataset) -> Dataset:
    pairs = [
        {"prompt": row["prompt"], "chosen": better, "rejected": worse}
        for row in ranked
        for (better, high), (worse, low) in permutations(zip(row["completions"], row["scores"], strict=True), 2)
        if high > low
    ]
    return Dataset.from_list(pairs)


@pytest.mark.long
def test_rankings_teach_an_order_better_than_pairs_of_equal_tokens(tmp_path: Path) -> None:
    """Both take the same number of steps: on rankings of 8 prompts, or on pairs, half of one prompt's comparisons."""
    model = tiny.save_tiny(tmp_path / "model", [" ".join(WORDS), " " + " ".join(WORDS)])
    ranked, held_out = word_rankings(300, 0), word_rankings(60, 1)
    settings: dict[str, Any] = {"max_steps": 80, "learning_rate": 1e-2, "logging_steps": 80}
    runs = [
        run_of(model, tmp_path / "run", data=rows, per_device_train_batch_size=size, **settings)
        for rows, size in ((ranked, 8), (as_pairs(ranked), 14))
    ]
    of_rankings, of_pairs = (
        np.mean([batch.parts[0].input_ids_RL.numel() for batch in run.get_train_dataloader()]) for run in runs
    )
    assert of_rankings == pytest.approx(of_pairs, rel=0.03)
    taus = [run.evaluate(held_out)["eval_kendall_tau"] for run in runs]
    assert taus[0] > 0.95 and taus[0] > taus[1] + 0.02, taus
