"""Scripts written for TRL up to 0.23 run with only their import changed, and get the right numbers.

The reference is the Hugging Face model itself, called in float64 on one dialogue at a time, without padding.
"""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, TaskType
from torch.nn.functional import logsigmoid
from transformers import EvalPrediction, LlamaForSequenceClassification, PreTrainedTokenizerFast, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny  # noqa: E402

import trl_tpu  # noqa: E402
from trl_tpu import RewardConfig, RewardDataCollatorWithPadding, RewardTrainer  # noqa: E402
from trl_tpu.trainer.reward_trainer import _tokenize  # noqa: E402
from trl_tpu.trainer.utils import compute_accuracy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
HALVES = ("chosen", "rejected")


class Old(NamedTuple):
    """What an old script has in its hands before it makes a trainer."""

    model: LlamaForSequenceClassification
    tokenizer: PreTrainedTokenizerFast
    raw: Dataset
    pairs: Dataset


def old_columns(raw: Dataset, tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """The preprocessing function of TRL's old examples."""

    def preprocess(row: dict[str, Any]) -> dict[str, list[int]]:
        halves = {half: tokenizer(row[half]) for half in HALVES}
        return {f"{key}_{half}": halves[half][key] for half in HALVES for key in ("input_ids", "attention_mask")}

    return raw.map(preprocess)


@pytest.fixture(scope="module")
def made() -> Old:
    pairs = tiny.made_up_pairs(12, margin=True)
    raw = pairs.map(lambda row: {half: row["prompt"] + row[half] for half in HALVES}, remove_columns="prompt")
    tokenizer = tiny.tiny_tokenizer([*raw["chosen"], *raw["rejected"]], vocab_size=400)
    return Old(tiny.tiny_model(tokenizer), tokenizer, raw, old_columns(raw, tokenizer))


@pytest.fixture
def old(made: Old) -> Old:
    """Fresh copies: a trainer writes into its model."""
    return made._replace(model=copy.deepcopy(made.model), tokenizer=copy.deepcopy(made.tokenizer))


def config(folder: Path, **settings: Any) -> RewardConfig:
    quiet = {"bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    return RewardConfig(str(folder), **(quiet | settings))


def rewards_alone(model: LlamaForSequenceClassification, pairs: Dataset) -> torch.Tensor:
    """Rewards [N, 2] in float64, each dialogue in a forward of its own."""
    exact = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        rewards = [[exact(torch.tensor([row[f"input_ids_{half}"]])).logits.item() for half in HALVES] for row in pairs]
    return torch.tensor(rewards, dtype=torch.float64)


def mean_loss(rewards_N2: torch.Tensor, margin_N: Any = 0.0) -> float:
    return -logsigmoid(rewards_N2[:, 0] - rewards_N2[:, 1] - torch.as_tensor(margin_N)).mean().item()


def losses_of_hand_made_loop(old: Old, steps: int, learning_rate: float) -> list[float]:
    """Full-batch AdamW with gradient clipping, two forwards a pair, no trainer and no padding."""
    model = copy.deepcopy(old.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        pair_losses = []
        for row in old.pairs:
            chosen, rejected = (model(torch.tensor([row[f"input_ids_{half}"]])).logits.squeeze() for half in HALVES)
            pair_losses.append(-logsigmoid(chosen - rejected - row["margin"]))
        loss = torch.stack(pair_losses).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def logged(trainer: RewardTrainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


# ---- the collator


def test_names_are_where_old_scripts_import_them_from() -> None:
    assert trl_tpu.RewardDataCollatorWithPadding is trl_tpu.trainer.utils.RewardDataCollatorWithPadding
    assert "RewardDataCollatorWithPadding" in trl_tpu.__all__


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


def test_collator_pads_to_a_fixed_length_when_told(old: Old) -> None:
    batch = RewardDataCollatorWithPadding(old.tokenizer, padding="max_length", max_length=64)(old.pairs.to_list())
    assert batch["input_ids_chosen"].shape == batch["attention_mask_rejected"].shape == (12, 64)


def test_collator_names_the_missing_column(old: Old) -> None:
    rows = old.pairs.remove_columns("attention_mask_rejected").to_list()
    with pytest.raises(ValueError, match="attention_mask_rejected is missing"):
        RewardDataCollatorWithPadding(old.tokenizer)(rows)


# ---- the numbers


@pytest.mark.parametrize("multiple", [None, 32])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_reward(old: Old, tmp_path: Path, side: str, multiple: int | None) -> None:
    old.tokenizer.padding_side = side
    expected = rewards_alone(old.model, old.pairs)
    trainer = RewardTrainer(
        model=old.model,
        args=config(tmp_path, per_device_eval_batch_size=5),
        tokenizer=old.tokenizer,
        train_dataset=old.pairs,
        data_collator=RewardDataCollatorWithPadding(old.tokenizer, pad_to_multiple_of=multiple),
    )
    _, outputs = trainer.compute_loss(trainer.model, trainer.data_collator(old.pairs.to_list()), return_outputs=True)
    assert set(outputs) == {"rewards_chosen", "rewards_rejected"}
    rewards = torch.stack([outputs["rewards_chosen"], outputs["rewards_rejected"]], dim=-1)
    torch.testing.assert_close(rewards.double(), expected, atol=1e-6, rtol=0)
    predictions = trainer.predict(old.pairs).predictions
    assert predictions.shape == (12, 2)
    np.testing.assert_allclose(predictions, expected.softmax(-1), atol=1e-6)
    np.testing.assert_allclose(predictions.sum(-1), 1.0, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_pad_equal_to_eos_reads_the_reward_where_transformers_does(old: Old, tmp_path: Path, side: str) -> None:
    old.tokenizer.pad_token, old.tokenizer.padding_side = old.tokenizer.eos_token, side
    end = [old.tokenizer.eos_token_id]
    pairs = old.pairs.map(
        lambda row: (
            {f"input_ids_{half}": row[f"input_ids_{half}"] + end for half in HALVES}
            | {f"attention_mask_{half}": row[f"attention_mask_{half}"] + [1] for half in HALVES}
        )
    )
    trainer = RewardTrainer(model=old.model, args=config(tmp_path), tokenizer=old.tokenizer, train_dataset=pairs)
    assert trainer.model.config.pad_token_id == end[0]
    expected = rewards_alone(trainer.model, pairs)  # transformers' own pooling
    torch.testing.assert_close(expected, rewards_alone(trainer.model, old.pairs))  # at the token before the eos
    np.testing.assert_allclose(trainer.predict(pairs).predictions, expected.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("nested", [False, True])
def test_margin_is_subtracted_pair_by_pair(old: Old, tmp_path: Path, nested: bool) -> None:
    margins = torch.linspace(-2, 3, 12, dtype=torch.float64)
    column = [[value] for value in margins.tolist()] if nested else margins.tolist()
    pairs = old.pairs.remove_columns("margin").add_column("margin", column)
    rewards = rewards_alone(old.model, pairs)
    trainer = RewardTrainer(model=old.model, args=config(tmp_path), tokenizer=old.tokenizer, train_dataset=pairs)
    batch = trainer.data_collator(pairs.to_list())
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert loss.item() == pytest.approx(mean_loss(rewards, margins), abs=1e-6)
    by_hand = -logsigmoid(outputs["rewards_chosen"] - outputs["rewards_rejected"] - batch["margin"]).mean()
    assert loss.item() == pytest.approx(by_hand.item(), abs=1e-6)
    every_margin_from_every_pair = -logsigmoid(rewards[:, :1] - rewards[:, 1:] - margins).mean().item()
    assert abs(every_margin_from_every_pair - loss.item()) > 1e-5  # TRL 0.9 to 0.20


def test_an_old_script_trains_as_a_hand_made_loop_does(old: Old, tmp_path: Path) -> None:
    expected = losses_of_hand_made_loop(old, steps=3, learning_rate=1e-2)
    args = config(
        tmp_path,
        per_device_train_batch_size=12,
        per_device_eval_batch_size=5,
        max_steps=3,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
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


def test_accuracy_needs_no_compute_metrics(old: Old, tmp_path: Path) -> None:
    rewards = rewards_alone(old.model, old.pairs)
    trainer = RewardTrainer(
        model=old.model,
        args=config(tmp_path),
        tokenizer=old.tokenizer,
        train_dataset=old.pairs,
        eval_dataset=old.pairs,
    )
    expected = (rewards[:, 0] > rewards[:, 1]).double().mean().item()
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(expected)
    assert compute_accuracy(trainer.predict(old.pairs))["accuracy"] == pytest.approx(expected)


def test_accuracy_leaves_ties_out_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    right_and_wrong = EvalPrediction(torch.tensor([[0.1, 0.9], [0.9, 0.1]]), torch.tensor([0, 0]))
    assert compute_accuracy(right_and_wrong) == {"accuracy": 0.5}
    assert not caplog.records
    predictions = np.array([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    assert compute_accuracy(EvalPrediction(predictions, np.zeros(4)))["accuracy"] == pytest.approx(2 / 3)
    assert "1 out of 4" in caplog.text


# ---- the trainer's arguments


def test_model_init_starts_each_training_anew(old: Old, tmp_path: Path) -> None:
    expected = losses_of_hand_made_loop(old, steps=2, learning_rate=1e-2)
    args = config(
        tmp_path, per_device_train_batch_size=12, max_steps=2, learning_rate=1e-2, lr_scheduler_type="constant"
    )
    trainer = RewardTrainer(
        model_init=lambda: copy.deepcopy(old.model), args=args, tokenizer=old.tokenizer, train_dataset=old.pairs
    )
    for _ in range(2):
        trainer.train()
        assert logged(trainer, "loss") == pytest.approx(expected, abs=1e-5)
        assert trainer.model.model_tags == trainer._tag_names


def test_a_plain_training_arguments_keeps_all_its_settings(old: Old, tmp_path: Path) -> None:
    @dataclass
    class ScriptTrainingArguments(TrainingArguments):
        their_own: str = "kept"

    args = ScriptTrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=12,
        max_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=7,
        their_own="mine",
    )
    before = copy.deepcopy(args.to_dict())
    expected = losses_of_hand_made_loop(old, steps=2, learning_rate=1e-2)
    with pytest.warns(FutureWarning, match="RewardConfig"):
        trainer = RewardTrainer(model=old.model, args=args, tokenizer=old.tokenizer, train_dataset=old.pairs)
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx(expected, abs=1e-5)
    assert args.to_dict() == before
    assert isinstance(trainer.args, RewardConfig)
    assert trainer.args.their_own == "mine"
    after = trainer.args.to_dict()
    differing = {name for name in before if after.get(name, before[name]) != before[name]}
    assert differing <= {"optim"}
    assert trainer.args.optim == "adamw_torch"
    assert trainer.args.max_length is None


@pytest.mark.parametrize("tokenised", [True, False])
def test_max_length_of_the_trainer_leaves_long_pairs_out(
    old: Old, tmp_path: Path, caplog: pytest.LogCaptureFixture, tokenised: bool
) -> None:
    lengths = [max(len(row[f"input_ids_{half}"]) for half in HALVES) for row in old.pairs]
    limit = int(np.median(lengths))
    kept = sum(length <= limit for length in lengths)
    assert 0 < kept < 12
    args = config(tmp_path)
    trainer = RewardTrainer(
        model=old.model,
        args=args,
        tokenizer=old.tokenizer,
        train_dataset=old.pairs if tokenised else old.raw,
        data_collator=RewardDataCollatorWithPadding(old.tokenizer),
        max_length=limit,
    )
    assert len(trainer.train_dataset) == kept
    assert f"{12 - kept} of 12 pairs dropped" in caplog.text
    assert args.max_length == 1024  # the caller's config is the caller's


def test_raw_rows_are_tokenised_as_they_were(old: Old, tmp_path: Path) -> None:
    collator = RewardDataCollatorWithPadding(old.tokenizer)
    trainer = RewardTrainer(
        model=old.model, args=config(tmp_path), tokenizer=old.tokenizer, train_dataset=old.raw, data_collator=collator
    )
    expected = old.raw.map(_tokenize, batched=True, fn_kwargs={"tokenizer": old.tokenizer})
    assert trainer.train_dataset[:] == expected[:]
    np.testing.assert_allclose(
        trainer.predict(old.raw).predictions, rewards_alone(old.model, old.pairs).softmax(-1), atol=1e-6
    )


def test_lora_trains_adapters_and_the_head_only(old: Old, tmp_path: Path) -> None:
    first_loss = mean_loss(rewards_alone(old.model, old.pairs), old.pairs["margin"][:])
    before = {name: parameter.clone() for name, parameter in old.model.named_parameters()}
    trainer = RewardTrainer(
        model=old.model,
        args=config(tmp_path, per_device_train_batch_size=12, max_steps=2, learning_rate=0.1),
        tokenizer=old.tokenizer,
        train_dataset=old.pairs,
        peft_config=LoraConfig(task_type=TaskType.SEQ_CLS, inference_mode=False, r=8, lora_alpha=32, lora_dropout=0.1),
    )
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(first_loss, abs=1e-5)  # a new adapter adds nothing
    assert logged(trainer, "loss")[1] < first_loss
    changed = set()
    for name, parameter in trainer.model.base_model.model.named_parameters():
        original = before.get(name.replace(".base_layer", "").replace("score.original_module", "score"))
        if original is not None:
            assert torch.equal(parameter, original), name
        elif "modules_to_save" in name:
            assert not torch.equal(parameter, before["score.weight"])
            changed.add("score")
        elif "lora_B" in name:
            assert parameter.abs().max() > 0
            changed.add("adapter")
    assert changed == {"score", "adapter"}


# ---- warnings and errors


@pytest.mark.filterwarnings("default::FutureWarning")
def test_every_old_name_warns_with_todays_spelling(old: Old, tmp_path: Path) -> None:
    with pytest.warns(FutureWarning) as caught:
        args = config(tmp_path, evaluation_strategy="steps", eval_steps=5)
        RewardTrainer(
            model=old.model,
            args=args,
            tokenizer=old.tokenizer,
            train_dataset=old.pairs,
            eval_dataset=old.pairs,
            max_length=512,
        )
    messages = [str(warning.message) for warning in caught if warning.category is FutureWarning]
    for old_name, new_name in {
        "`evaluation_strategy`": "`eval_strategy`",
        "`tokenizer`": "`processing_class`",
        "`max_length`": "RewardConfig(max_length=...)",
        "`RewardDataCollatorWithPadding`": "`DataCollatorForPreference`",
        "input_ids_chosen": "chosen_ids",
    }.items():
        assert any(old_name in message and new_name in message for message in messages), old_name
    ours = [warning for warning in caught if "deprecated" in str(warning.message)]
    assert {warning.filename for warning in ours} == {__file__}, "a warning points at the script's line"


@pytest.mark.filterwarnings("error::FutureWarning")
def test_todays_spelling_does_not_warn(old: Old, tmp_path: Path) -> None:
    trainer = RewardTrainer(
        model=old.model, args=config(tmp_path), processing_class=old.tokenizer, train_dataset=old.raw
    )
    assert trainer.predict(old.raw).predictions.shape == (12, 2)


def test_two_labels_are_refused_with_the_fix(old: Old, tmp_path: Path) -> None:
    old.model.config.num_labels = 2
    with pytest.raises(ValueError, match=r"num_labels=2.*from_pretrained\(\.\.\., num_labels=1\)"):
        RewardTrainer(model=old.model, args=config(tmp_path), tokenizer=old.tokenizer, train_dataset=old.pairs)


def test_two_tokenizers_are_refused(old: Old, tmp_path: Path) -> None:
    both = {"tokenizer": old.tokenizer, "processing_class": old.tokenizer}
    with pytest.raises(ValueError, match="only `processing_class`"):
        RewardTrainer(model=old.model, args=config(tmp_path), train_dataset=old.pairs, **both)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("lacks a mask", "lacks attention_mask_rejected"),
        ("margin is NaN", "Row 3 of the train dataset: `margin` is nan"),
        ("a dialogue is empty", "Row 3 of the train dataset: `input_ids_chosen` holds no tokens"),
        ("all too long", "all 12 pairs were dropped"),
        ("today's columns, old collator", "Leave `data_collator` out"),
    ],
)
def test_bad_data_stops_before_training(old: Old, tmp_path: Path, fault: str, message: str) -> None:
    pairs, max_length = old.pairs, None
    if fault == "lacks a mask":
        pairs = pairs.remove_columns("attention_mask_rejected")
    elif fault == "margin is NaN":
        pairs = pairs.map(lambda row, index: {"margin": float("nan") if index == 3 else 0.0}, with_indices=True)
    elif fault == "a dialogue is empty":
        pairs = pairs.map(
            lambda row, index: {"input_ids_chosen": [] if index == 3 else row["input_ids_chosen"]}, with_indices=True
        )
    elif fault == "all too long":
        max_length = 1
    else:
        pairs = pairs.rename_columns({f"input_ids_{half}": f"{half}_ids" for half in HALVES})
        pairs = pairs.remove_columns([f"attention_mask_{half}" for half in HALVES])
    with pytest.raises(ValueError, match=message):
        RewardTrainer(
            model=old.model,
            args=config(tmp_path),
            tokenizer=old.tokenizer,
            train_dataset=pairs,
            data_collator=RewardDataCollatorWithPadding(old.tokenizer),
            max_length=max_length,
        )


def test_old_columns_may_stream(old: Old, tmp_path: Path) -> None:
    expected = losses_of_hand_made_loop(old, steps=2, learning_rate=1e-2)
    args = config(
        tmp_path, per_device_train_batch_size=12, max_steps=2, learning_rate=1e-2, lr_scheduler_type="constant"
    )
    stream = old.pairs.to_iterable_dataset()
    trainer = RewardTrainer(model=old.model, args=args, tokenizer=old.tokenizer, train_dataset=stream)
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx(expected, abs=1e-5)
