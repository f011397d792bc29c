"""Each argument of TRL up to 0.23 works, with a warning that names today's; bad old data stops before training."""

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from old_pairs import (
    HALVES,
    Old,
    config,
    full_batch_config,
    logged,
    losses_of_hand_made_loop,
    rewards_alone,
)
from transformers import PrinterCallback, TrainingArguments

from trl_tpu import RewardConfig, RewardDataCollatorWithPadding, RewardTrainer
from trl_tpu.errors import UserError
from trl_tpu.trainer.reward_trainer import _tokenize

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


# ---- the trainer's arguments


def test_model_init_starts_each_training_anew(old: Old, tmp_path: Path) -> None:
    expected = losses_of_hand_made_loop(old, steps=2)
    args = full_batch_config(tmp_path, max_steps=2)
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
    expected = losses_of_hand_made_loop(old, steps=2)
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


@pytest.mark.parametrize("tokenized", [True, False])
def test_max_length_of_the_trainer_leaves_long_pairs_out(
    old: Old, tmp_path: Path, caplog: pytest.LogCaptureFixture, tokenized: bool
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
        train_dataset=old.pairs if tokenized else old.raw,
        data_collator=RewardDataCollatorWithPadding(old.tokenizer),
        max_length=limit,
    )
    assert len(trainer.train_dataset) == kept
    assert f"{12 - kept} of 12 pairs dropped" in caplog.text
    assert args.max_length == 1024  # the caller's config is the caller's


def test_raw_rows_are_tokenized_as_they_were(old: Old, tmp_path: Path) -> None:
    collator = RewardDataCollatorWithPadding(old.tokenizer)
    trainer = RewardTrainer(
        model=old.model, args=config(tmp_path), tokenizer=old.tokenizer, train_dataset=old.raw, data_collator=collator
    )
    expected = old.raw.map(_tokenize, batched=True, fn_kwargs={"tokenizer": old.tokenizer})
    assert trainer.train_dataset[:] == expected[:]
    np.testing.assert_allclose(
        trainer.predict(old.raw).predictions, rewards_alone(old.model, old.pairs).softmax(-1), atol=1e-6
    )


# ---- warnings and errors


@pytest.mark.filterwarnings("default::FutureWarning")
def test_every_old_name_warns_with_todays_spelling(old: Old, tmp_path: Path) -> None:
    with pytest.warns(FutureWarning) as caught:
        args = RewardConfig(str(tmp_path), bf16=False, report_to="none", evaluation_strategy="steps", eval_steps=5)
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
        "`evaluation_strategy`": "`eval_strategy='steps'`",
        "`tokenizer`": "`processing_class`",
        "`max_length`": "RewardConfig(max_length=...)",
        "`RewardDataCollatorWithPadding`": "`DataCollatorForPreference`",
    }.items():
        assert any(old_name in message and new_name in message for message in messages), old_name
    ours = [warning for warning in caught if "deprecated" in str(warning.message)]
    assert {warning.filename for warning in ours} == {__file__}, "a warning points at the script's line"


@pytest.mark.parametrize(
    ("old_name", "value", "today", "becomes"),
    [
        ("warmup_ratio", 0.1, "warmup_steps", 0.1),
        ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
        ("adafactor", True, "optim", "adafactor"),
        ("push_to_hub_organization", "us", "hub_model_id", "us/out"),
        ("push_to_hub_token", "secret", "hub_token", "secret"),
        ("overwrite_output_dir", True, "overwrite_output_dir", True),
    ],
)
def test_arguments_that_transformers_has_no_more_are_taken_as_todays(
    old_name: str, value: object, today: str, becomes: object, tmp_path: Path
) -> None:
    with pytest.warns(FutureWarning, match=f"`{old_name}` is deprecated"):
        args = RewardConfig(str(tmp_path / "out"), bf16=False, report_to="none", **{old_name: value})
    assert getattr(args, today) == becomes
    assert args.push_to_hub_token is None


def test_an_argument_that_asks_for_what_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`fsdp_min_num_params=10`.* is gone. Leave it out"):
        RewardConfig(str(tmp_path), bf16=False, report_to="none", fsdp_min_num_params=10)


def test_an_evaluation_strategy_that_is_set_later_counts(old: Old, tmp_path: Path) -> None:
    args = config(tmp_path)
    args.evaluation_strategy, args.of_the_script = "epoch", 1
    trainer = RewardTrainer(
        model=old.model, args=args, processing_class=old.tokenizer, train_dataset=old.raw, eval_dataset=old.raw
    )
    assert trainer.args.eval_strategy == "epoch" and args.eval_strategy == "no"
    assert trainer.args.of_the_script == 1  # a callback may read it


def test_model_init_may_stand_where_trl_once_had_it(old: Old, tmp_path: Path) -> None:
    arguments = (None, config(tmp_path, max_steps=1), None, old.pairs, None, old.tokenizer)
    trainer = RewardTrainer(*arguments, lambda: copy.deepcopy(old.model), None, [PrinterCallback()])
    assert trainer.model_init is not None and trainer.compute_metrics is None
    assert any(isinstance(each, PrinterCallback) for each in trainer.callback_handler.callbacks)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_todays_spelling_does_not_warn(old: Old, tmp_path: Path) -> None:
    trainer = RewardTrainer(
        model=old.model, args=config(tmp_path), processing_class=old.tokenizer, train_dataset=old.raw
    )
    assert trainer.predict(old.raw).predictions.shape == (12, 2)


def test_two_tokenizers_are_refused(old: Old, tmp_path: Path) -> None:
    both = {"tokenizer": old.tokenizer, "processing_class": old.tokenizer}
    with pytest.raises(ValueError, match="only `processing_class`"):
        RewardTrainer(model=old.model, args=config(tmp_path), train_dataset=old.pairs, **both)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("lacks a mask", "lacks attention_mask_rejected"),
        ("today's columns, old collator", "Leave `data_collator` out"),
    ],
)
def test_bad_data_stops_before_training(old: Old, tmp_path: Path, fault: str, message: str) -> None:
    if fault == "lacks a mask":
        pairs = old.pairs.remove_columns("attention_mask_rejected")
    else:
        pairs = old.pairs.rename_columns({f"input_ids_{half}": f"{half}_ids" for half in HALVES})
        pairs = pairs.remove_columns([f"attention_mask_{half}" for half in HALVES])
    with pytest.raises(ValueError, match=message):
        RewardTrainer(
            model=old.model,
            args=config(tmp_path),
            tokenizer=old.tokenizer,
            train_dataset=pairs,
            data_collator=RewardDataCollatorWithPadding(old.tokenizer),
        )


def test_old_columns_may_stream(old: Old, tmp_path: Path) -> None:
    expected = losses_of_hand_made_loop(old, steps=2)
    args = full_batch_config(tmp_path, max_steps=2)
    stream = old.pairs.to_iterable_dataset()
    trainer = RewardTrainer(model=old.model, args=args, tokenizer=old.tokenizer, train_dataset=stream)
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx(expected, abs=1e-5)
