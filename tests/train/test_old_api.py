"""Scripts written for TRL up to 0.23 run with only their import changed, and get the right numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from old_pairs import (
    HALVES,
    Old,
    config,
    full_batch_config,
    logged,
    losses_of_hand_made_loop,
    mean_loss,
    rewards_alone,
)
from transformers import EvalPrediction

import trl_tpu
from trl_tpu import RewardDataCollatorWithPadding, RewardTrainer
from trl_tpu.trainer.utils import compute_accuracy

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("side", ["left", "right"])
def test_collator_pads_each_half_by_itself_on_the_tokenizers_side(old: Old, side: str) -> None:
    old.tokenizer.padding_side = side
    rows = old.pairs.select(range(5)).to_list()
    collate = RewardDataCollatorWithPadding(old.tokenizer, padding=True, max_length=512, pad_to_multiple_of=8)
    batch = collate(rows)
    assert set(batch) == {*trl_tpu.data.collators.LEGACY_KEYS, "margin", "return_loss"}
    assert batch["return_loss"] is True
    assert batch["margin"].tolist() == pytest.approx([row["margin"] for row in rows])
    for half in HALVES:
        ids = [row[f"input_ids_{half}"] for row in rows]
        longest = max(map(len, ids))
        length = longest + -longest % 8
        pads = [[old.tokenizer.pad_token_id] * (length - len(row)) for row in ids]
        joined = [pad + row if side == "left" else row + pad for pad, row in zip(pads, ids, strict=True)]
        assert batch[f"input_ids_{half}"].tolist() == joined
        assert batch[f"attention_mask_{half}"].sum(1).tolist() == [len(row) for row in ids]
        real = batch[f"input_ids_{half}"] != old.tokenizer.pad_token_id
        assert torch.equal(batch[f"attention_mask_{half}"].bool(), real)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_reward(old: Old, tmp_path: Path, side: str) -> None:
    old.tokenizer.padding_side = side
    expected = rewards_alone(old.model, old.pairs)
    trainer = RewardTrainer(
        model=old.model,
        args=config(tmp_path, per_device_eval_batch_size=5),
        tokenizer=old.tokenizer,
        train_dataset=old.pairs,
        data_collator=RewardDataCollatorWithPadding(old.tokenizer, pad_to_multiple_of=32),
    )
    _, outputs = trainer.compute_loss(trainer.model, trainer.data_collator(old.pairs.to_list()), return_outputs=True)
    assert set(outputs) == {"rewards_chosen", "rewards_rejected"}
    rewards = torch.stack([outputs["rewards_chosen"], outputs["rewards_rejected"]], dim=-1)
    torch.testing.assert_close(rewards.double(), expected, atol=1e-6, rtol=0)
    predictions = trainer.predict(old.pairs).predictions
    assert predictions.shape == (12, 2)
    np.testing.assert_allclose(predictions, expected.softmax(-1), atol=1e-6)


def test_margin_is_subtracted_pair_by_pair(old: Old, tmp_path: Path) -> None:
    """Also where each is in a list of one, as scripts of then had it."""
    margins = torch.linspace(-2, 3, 12, dtype=torch.float64)
    pairs = old.pairs.remove_columns("margin").add_column("margin", [[value] for value in margins.tolist()])
    rewards = rewards_alone(old.model, pairs)
    trainer = RewardTrainer(model=old.model, args=config(tmp_path), tokenizer=old.tokenizer, train_dataset=pairs)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(pairs.to_list()))
    assert loss.item() == pytest.approx(mean_loss(rewards, margins), abs=1e-6)


def test_an_old_script_trains_as_a_hand_made_loop_does(old: Old, tmp_path: Path) -> None:
    expected = losses_of_hand_made_loop(old, steps=3)
    args = full_batch_config(
        tmp_path,
        per_device_eval_batch_size=5,
        max_steps=3,
        evaluation_strategy="steps",
        eval_steps=1,
        remove_unused_columns=False,
    )
    trainer = RewardTrainer(
        model=old.model,
        args=args,
        tokenizer=old.tokenizer,
        train_dataset=old.pairs,
        eval_dataset=old.pairs,
        max_length=512,
        compute_metrics=compute_accuracy,
    )
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx(expected, abs=1e-5)
    assert len(logged(trainer, "eval_accuracy")) == 3
    rewards = rewards_alone(trainer.model, old.pairs)
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] == pytest.approx((rewards[:, 0] > rewards[:, 1]).double().mean().item())
    # the loss of an evaluation in batches of 5, 5 and 2 pairs is the mean over the 12 pairs
    assert metrics["eval_loss"] == pytest.approx(mean_loss(rewards, old.pairs["margin"][:]), abs=1e-5)
    assert trainer.model.model_tags == trainer._tag_names


def test_accuracy_leaves_ties_out_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    right_and_wrong = EvalPrediction(torch.tensor([[0.1, 0.9], [0.9, 0.1]]), torch.tensor([0, 0]))
    assert compute_accuracy(right_and_wrong) == {"accuracy": 0.5}
    assert not caplog.records
    predictions = np.array([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    assert compute_accuracy(EvalPrediction(predictions, np.zeros(4)))["accuracy"] == pytest.approx(2 / 3)
    assert "1 out of 4" in caplog.text
