"""Scripts for TRL up to 0.23 run with a changed import and give the right numbers.

The reference is the Hugging Face model, called on one sequence at a time, without padding. A whole script is in
`support/old_script.py`. TRL 1.16 cannot run it, but trains on the same tokens. The tolerance is 1e-5: float32 sums
have another order over three steps.
"""

import copy
import json
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
import torch
import transformers
import trl
from datasets import Dataset
from environment import SUPPORT
from peft import LoraConfig
from preference_rows import assistant, user, write_jsonl
from torch.nn.functional import cross_entropy, logsigmoid
from training import QUIET, losses, trained
from transformers import EvalPrediction, PrinterCallback
from transformers.trainer_pt_utils import AcceleratorConfig

import trl_tpu
from trl_tpu import RewardConfig, RewardDataCollatorWithPadding, RewardTrainer
from trl_tpu.errors import UserError
from trl_tpu.trainer.utils import compute_accuracy

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
HALVES = ("chosen", "rejected")


class OldScript(NamedTuple):
    """Objects of an old script before it creates a trainer: 12 pairs with margins, as text and as tokens."""

    model: Any
    tokenizer: Any
    raw: Dataset
    pairs: Dataset


@pytest.fixture(scope="module")
def made() -> OldScript:
    pairs = tiny.made_up_pairs(12, margin=True)
    raw = pairs.map(lambda row: {half: row["prompt"] + row[half] for half in HALVES}, remove_columns="prompt")
    tokenizer = tiny.tiny_tokenizer(raw, vocab_size=400)

    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        halves = {half: tokenizer(row[half]) for half in HALVES}
        return {f"{key}_{half}": halves[half][key] for half in HALVES for key in ("input_ids", "attention_mask")}

    return OldScript(tiny.tiny_model(tokenizer), tokenizer, raw, raw.map(preprocess))


@pytest.fixture
def old(made: OldScript) -> OldScript:
    """Return copies, since a trainer changes its model."""
    return made._replace(model=copy.deepcopy(made.model), tokenizer=copy.deepcopy(made.tokenizer))


OFTEN = QUIET | {"save_strategy": "no", "logging_steps": 1}
FULL_BATCH: dict[str, Any] = {"per_device_train_batch_size": 12, "learning_rate": 1e-2}


def config(folder: Path, **settings: Any) -> RewardConfig:
    return RewardConfig(str(folder), **OFTEN | settings)


def rewards_alone(model: Any, pairs: Dataset) -> torch.Tensor:
    """Return rewards [N, 2] in float64, each sequence in a separate forward."""
    exact = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        rewards = [[exact(torch.tensor([row[f"input_ids_{half}"]])).logits.item() for half in HALVES] for row in pairs]
    return torch.tensor(rewards, dtype=torch.float64)


def current_losses(old: OldScript, folder: Path, steps: int) -> list[float]:
    """Return the losses on the same tokens in current columns; `test_numbers_equal_trl.py` compares them with TRL."""
    tokens = old.pairs.map(lambda row: {f"{half}_ids": row[f"input_ids_{half}"] for half in HALVES})
    pairs = tokens.select_columns(["chosen_ids", "rejected_ids", "margin"])
    args, model = config(folder, max_steps=steps, **FULL_BATCH), copy.deepcopy(old.model)
    return losses(trained(RewardTrainer(model, args, train_dataset=pairs, processing_class=old.tokenizer)))


# ---- the numbers


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_prediction_and_probabilities_count(old: OldScript, tmp_path: Path, side: str) -> None:
    old.tokenizer.padding_side = side
    args, collate = config(tmp_path), RewardDataCollatorWithPadding(old.tokenizer, pad_to_multiple_of=32)
    trainer = RewardTrainer(old.model, args, collate, old.pairs, tokenizer=old.tokenizer)
    rewards_N2, sure_N = rewards_alone(old.model, old.pairs), torch.tensor([0.1, 0.9, 1.0] * 4, dtype=torch.float64)
    np.testing.assert_allclose(trainer.predict(old.pairs).predictions, rewards_N2.softmax(-1), atol=1e-6)
    pairs = old.pairs.remove_columns("margin").add_column("chosen_probability", sure_N.tolist())
    expected = cross_entropy(rewards_N2, torch.stack([sure_N, 1 - sure_N], dim=-1))
    assert trainer.evaluate(pairs)["eval_loss"] == pytest.approx(expected.item(), abs=1e-6)


def test_old_script_trains_like_a_current_one(old: OldScript, tmp_path: Path) -> None:
    """Margins are lists of one number, as in old scripts."""
    expected = current_losses(old, tmp_path, steps=3)
    pairs = old.pairs.map(lambda row: {"margin": [row["margin"]]})
    trainer = RewardTrainer(
        model=old.model,
        args=config(tmp_path, per_device_eval_batch_size=5, max_steps=3, evaluation_strategy="steps", **FULL_BATCH),
        **{"tokenizer": old.tokenizer, "train_dataset": pairs, "eval_dataset": pairs},
        max_length=512,
        compute_metrics=compute_accuracy,
    )
    trainer.train()
    assert losses(trainer) == pytest.approx(expected, abs=1e-5)
    chosen_N, rejected_N = rewards_alone(trainer.model, old.pairs).T
    metrics, margins = trainer.evaluate(), chosen_N - rejected_N - torch.tensor(old.pairs["margin"][:])
    assert metrics["eval_accuracy"] == pytest.approx((chosen_N > rejected_N).double().mean().item())
    # batches of 5, 5 and 2 pairs: the evaluation loss is the mean over all 12 pairs
    assert metrics["eval_loss"] == pytest.approx(-logsigmoid(margins).mean().item(), abs=1e-5)


def test_model_init_restarts_each_training_also_on_streams(old: OldScript, tmp_path: Path) -> None:
    expected = current_losses(old, tmp_path, steps=2)
    args, stream = config(tmp_path, max_steps=2, **FULL_BATCH), old.pairs.to_iterable_dataset()
    given = {"args": args, "tokenizer": old.tokenizer, "train_dataset": stream}
    trainer = RewardTrainer(model_init=lambda: copy.deepcopy(old.model), **given)
    for _ in range(2):
        trainer.train()
        assert losses(trainer) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("package", [transformers, trl_tpu])
def test_plain_training_arguments_keep_all_settings(package: Any, old: OldScript, tmp_path: Path) -> None:
    @dataclass
    class ScriptTrainingArguments(package.TrainingArguments):  # type: ignore[misc, name-defined]
        their_own: str = "kept"

    more = {"evaluation_strategy": "no"} if package is trl_tpu else {}
    settings = {"max_steps": 2, "seed": 7, "their_own": "mine", "remove_unused_columns": False} | OFTEN | more
    args = ScriptTrainingArguments(str(tmp_path), **settings, **FULL_BATCH)
    before = copy.deepcopy(args.to_dict())
    expected = current_losses(old, tmp_path, steps=2)
    trainer = trained(RewardTrainer(model=old.model, args=args, tokenizer=old.tokenizer, train_dataset=old.pairs))
    assert losses(trainer) == pytest.approx(expected, abs=1e-5)
    assert args.to_dict() == before
    assert isinstance(trainer.args, RewardConfig) and trainer.args.their_own == "mine"
    after = trainer.args.to_dict()
    changed = {name for name in before if after.get(name, before[name]) != before[name]}
    # transformers writes a placeholder for tokens
    assert changed <= {"dataloader_pin_memory", "hub_token", "push_to_hub_token"}
    assert trainer.args.max_length is None


def test_trainer_max_length_drops_long_pairs(old: OldScript, tmp_path: Path) -> None:
    lengths = [max(len(row[f"input_ids_{half}"]) for half in HALVES) for row in old.pairs]
    args, limit = config(tmp_path), int(np.median(lengths))
    kept = sum(length <= limit for length in lengths)
    for pairs in (old.pairs, old.raw):
        collate = RewardDataCollatorWithPadding(old.tokenizer)
        trainer = RewardTrainer(old.model, args, collate, pairs, tokenizer=old.tokenizer, max_length=limit)
        assert len(trainer.train_dataset) == kept < 12
    assert args.max_length == 1024  # the caller's config is not changed


def test_accuracy_excludes_ties_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    predictions = np.array([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    assert compute_accuracy(EvalPrediction(predictions, np.zeros(4)))["accuracy"] == pytest.approx(2 / 3)
    assert "1 out of 4" in caplog.text


# ---- arguments, warnings and errors


@pytest.mark.filterwarnings("default::FutureWarning")
def test_every_old_name_warns(old: OldScript, tmp_path: Path) -> None:
    with pytest.warns(FutureWarning) as caught:
        args = RewardConfig(str(tmp_path), bf16=False, report_to="none", evaluation_strategy="steps", eval_steps=5)
        given = {"train_dataset": old.pairs, "eval_dataset": old.pairs}
        RewardTrainer(model=old.model, args=args, tokenizer=old.tokenizer, max_length=512, **given)
    ours = [warning for warning in caught if "deprecated" in str(warning.message)]
    told = [str(warning.message) for warning in ours]
    for name in ("evaluation_strategy", "tokenizer", "max_length", "RewardDataCollatorWithPadding"):
        assert any(f"`{name}`" in each for each in told), name
    assert {warning.filename for warning in ours} == {__file__}, "a warning points at the script's line"


@pytest.mark.filterwarnings("error::FutureWarning")
def test_current_names_and_losses_on_old_columns_do_not_warn(old: OldScript, tmp_path: Path) -> None:
    class Either(RewardTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            assert "input_ids_chosen" not in inputs
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = Either(old.model, config(tmp_path), train_dataset=old.raw, processing_class=old.tokenizer)
    assert trainer.train_dataset.column_names[-2:] == ["chosen_ids", "rejected_ids"]


TAKEN: list[tuple[str, Any, str, Any]] = [
    ("warmup_ratio", 0.1, "warmup_steps", 0.1),
    ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
    ("adafactor", True, "optim", "adafactor"),
    ("push_to_hub_organization", "us", "hub_model_id", "us/out"),
    ("push_to_hub_token", "secret", "hub_token", "secret"),
    ("split_batches", True, "accelerator_config", AcceleratorConfig(split_batches=True)),
    *((name, True, name, True) for name in ("overwrite_output_dir", "use_ipex", "dispatch_batches")),
    ("save_safetensors", False, "save_safetensors", False),
]


@pytest.mark.parametrize(("old_name", "value", "today", "becomes"), TAKEN)
def test_old_arguments_are_accepted(old_name: str, value: Any, today: str, becomes: Any, tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match=f"`{old_name}` is deprecated"):
        args = RewardConfig(str(tmp_path / "out"), bf16=False, report_to="none", **{old_name: value})
    assert getattr(args, today) == becomes
    assert args.push_to_hub_token is None


def test_adapters_can_be_configured_by_a_dict(old: OldScript, tmp_path: Path) -> None:
    given = {"train_dataset": old.raw, "processing_class": old.tokenizer}
    trainer = RewardTrainer(old.model, config(tmp_path), peft_config={"r": 2}, **given)
    made = trainer.model.peft_config["default"]
    assert (made.peft_type, made.task_type, made.r) == ("LORA", "SEQ_CLS", 2)


def test_argument_for_a_removed_feature_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fsdp_min_num_params"):
        RewardConfig(str(tmp_path), bf16=False, report_to="none", fsdp_min_num_params=10)


def test_evaluation_strategy_set_later_takes_effect(old: OldScript, tmp_path: Path) -> None:
    args = config(tmp_path)
    args.evaluation_strategy, args.of_the_script = "epoch", 1
    trainer = RewardTrainer(old.model, args, None, old.raw, old.raw, processing_class=old.tokenizer)
    assert trainer.args.eval_strategy == "epoch" and args.eval_strategy == "no"
    assert trainer.args.of_the_script == 1  # a callback may read it


def test_model_init_may_be_passed_at_its_old_position(old: OldScript, tmp_path: Path) -> None:
    arguments = (None, config(tmp_path, max_steps=1), None, old.pairs, None, old.tokenizer)
    trainer = RewardTrainer(*arguments, lambda: copy.deepcopy(old.model), None, [PrinterCallback()])
    assert trainer.model_init is not None and trainer.compute_metrics is None
    assert any(isinstance(each, PrinterCallback) for each in trainer.callback_handler.callbacks)
    own = torch.optim.SGD(old.model.parameters(), lr=0.1)
    todays = RewardTrainer(old.model, *arguments[1:], optimizers=[own, None])  # type: ignore[arg-type]
    assert todays.optimizer is own
    lora = LoraConfig(task_type="SEQ_CLS", r=2)
    adapted = RewardTrainer(*arguments, model_init=lambda: old.model, peft_config=lora)
    assert adapted.model.get_base_model() is old.model


@pytest.mark.parametrize("count", [7, 8, 9, 10, 11, 12, 13])
def test_old_positions_may_hold_none(count: int, old: OldScript, tmp_path: Path) -> None:
    """TRL 0.7: model, ..., tokenizer, model_init, compute_metrics, callbacks, optimizers, ..., peft_config."""
    first = (old.model, config(tmp_path, max_steps=1), None, old.pairs, None, old.tokenizer)
    last = (None, compute_accuracy if count == 8 else None, None, (None, None), None, 512, None)
    trainer = trained(RewardTrainer(*(*first, *last)[:count]))  # type: ignore[arg-type]
    assert trainer.compute_metrics is last[1] and trainer.state.global_step == 1
    assert trainer.args.max_length == (512 if count >= 12 else config(tmp_path).max_length)


def test_tokenizer_under_both_names_is_rejected(old: OldScript, tmp_path: Path) -> None:
    names = {"tokenizer": old.tokenizer, "processing_class": old.tokenizer}
    with pytest.raises(ValueError, match="only `processing_class`"):
        RewardTrainer(old.model, config(tmp_path), train_dataset=old.pairs, **names)


# ---- a whole script for TRL 0.12 to 0.23


START, END = "<|im_start|>", "<|im_end|>"  # ChatML
OF_SCRIPT = OFTEN | {"num_train_epochs": 1, "per_device_train_batch_size": 8, "optim": "adamw_torch"}
FLAGS = {"model_name_or_path": "lab/model", "dataset_name": "lab/chats", "output_dir": "out"}
FLAGS |= {"evaluation_strategy": "epoch", "max_length": 512, "learning_rate": 1e-3} | OF_SCRIPT


def test_old_script_has_trls_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the model ChatML's template. The tokens of that are in the vocabulary."""
    pairs, lab = tiny.made_up_pairs(20), tmp_path / "lab"
    tokenizer = tiny.tiny_tokenizer(pairs, vocab_size=400)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END]})
    tokenizer.chat_template = None
    tiny.tiny_model(tokenizer, vocab_size=len(tokenizer)).save_pretrained(lab / "model")
    tokenizer.save_pretrained(lab / "model")
    chats = [{half: [user(row["prompt"]), assistant(row[half])] for half in HALVES} for row in pairs]
    write_jsonl(lab / "chats" / "train.jsonl", chats)

    def ids_of(messages: list[dict[str, str]]) -> list[int]:
        return tokenizer("".join(f"{START}{each['role']}\n{each['content']}{END}\n" for each in messages))["input_ids"]

    tokens = Dataset.from_list([{f"{half}_ids": ids_of(row[half]) for half in HALVES} for row in chats])
    args = trl.RewardConfig(str(tmp_path / "trl"), learning_rate=1e-3, max_length=None, use_cpu=True, **OF_SCRIPT)
    theirs = trained(trl.RewardTrainer(str(lab / "model"), args, train_dataset=tokens))
    monkeypatch.chdir(tmp_path)
    words = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["script", *words])
    runpy.run_path(str(SUPPORT / "old_script.py"), run_name="__main__")
    logs = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    found = [log["loss"] for log in logs if "loss" in log]
    assert len(found) == 3 and found == pytest.approx(losses(theirs), abs=1e-5)
