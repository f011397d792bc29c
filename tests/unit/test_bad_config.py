"""Impossible settings and arguments are rejected before training by an error that states rule, value and fix.

Every setting is declared once, and the declaration says whether it belongs to the identity of a run.
"""

import copy
import dataclasses
import logging
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import preference_rows
import pytest
from datasets import Dataset, DatasetDict
from tiny import made_up_pairs, tiny_model, tiny_tokenizer
from transformers import EarlyStoppingCallback, TrainerCallback

from trl_tpu import ModelConfig, RewardConfig, RewardTrainer
from trl_tpu.compat.arguments import REMOVED
from trl_tpu.config.checks import CIRCUMSTANCES, SETTINGS
from trl_tpu.data.trl_dict import old_columns
from trl_tpu.errors import UserError
from trl_tpu.experimental.prm import PRMConfig

PAIRS = made_up_pairs(8)


@pytest.fixture(scope="module")
def model_and_tokenizer() -> tuple[Any, Any]:
    """Return a tiny model and its tokenizer. Tests that change them must copy them."""
    tokenizer = tiny_tokenizer([" ".join(row.values()) for row in PAIRS], vocab_size=300)
    return tiny_model(tokenizer), tokenizer


@pytest.fixture
def make_trainer(model_and_tokenizer: tuple[Any, Any], tmp_path: Path) -> Any:
    """Return a function that builds a trainer from good arguments, some of them replaced."""

    def make(settings: dict[str, Any] | None = None, **arguments: Any) -> RewardTrainer:
        args = RewardConfig(**{"output_dir": str(tmp_path), "bf16": False, "report_to": "none", **(settings or {})})
        model, tokenizer = copy.deepcopy(model_and_tokenizer)
        given = {"model": model, "train_dataset": PAIRS, "processing_class": tokenizer, **arguments}
        return RewardTrainer(args=args, **given)

    return make


def token_pairs(*last: int, old: bool = False) -> Dataset:
    """Return three pairs of token ids; row 2 ends in the given ids."""
    rows = [{"chosen_ids": [5, 6, 7], "rejected_ids": [5, 8]}] * 2 + [{"chosen_ids": [5, 6], "rejected_ids": [*last]}]
    return Dataset.from_list(list(map(old_columns, rows)) if old else rows)


EMPTY = Dataset.from_dict({"chosen": [], "rejected": []})
BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer to be found": ({"processing_class": None}, "`processing_class`"),
    "no training data": ({"train_dataset": None}, "`train_dataset`"),
    "all splits to train on": ({"train_dataset": DatasetDict({"train": PAIRS, "test": PAIRS})}, "DatasetDict"),
    "a file as output_dir": ({"settings": {"output_dir": __file__}}, "output_dir must be a folder.*test_bad_config"),
    "one empty evaluation set of two": ({"eval_dataset": {"full": PAIRS, "hollow": EMPTY}}, "hollow"),
    "neither model nor model_init": ({"model": None}, "`model`.*`model_init`"),
    "a token id beyond the embeddings": ({"train_dataset": token_pairs(304, 9)}, "Row 2 .*train.*304"),
    "a token id below 0 in one of the evaluation sets": (
        {"eval_dataset": {"good": PAIRS, "bad": token_pairs(-100)}},
        "Row 2 .*bad.*-100",
    ),
    "a token id beyond the embeddings in the old columns": (
        {"train_dataset": token_pairs(304, old=True)},
        "Row 2 .*train.*`rejected_ids`.*304",
    ),
    "an unknown pad token": ({"settings": {"pad_token": "<nope>"}}, "`pad_token`.*<nope>"),
    "frozen weights that the model lacks": ({"settings": {"frozen_parameters": "lm_head"}}, "frozen_parameters="),
    "a mesh for other devices": ({"settings": {"mesh": "data=2,fsdp=4"}}, "data=2.*fsdp=4"),
    "two URLs": ({"settings": {"output_dir": "file:///one", "output_url": "file:///two"}}, "output_dir.*output_url"),
    "neither pad nor eos token": (
        {"processing_class": preference_rows.tiny_tokenizer(pad_token=None, eos_token=None)},
        "pad_token",
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_trainer_arguments_are_rejected(case: str, make_trainer: Any) -> None:
    arguments, message = BAD_ARGUMENTS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        make_trainer(**arguments)


NAMES = ["helpful", "brief"]
END: dict[str, Any] = {"learning_rate": 1e-3, "learning_rate_end": 1e-4}
TOTAL: dict[str, Any] = {"total_batch_size": 24}
NO_DURATIONS = ("", "2", "2h 30m", "2h30", "30m2h", "1h1h", "2H", "2:30", "1.5h", "-1h", "0h", "02h", "90s", "1h\n")
BAD_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("per_device_train_batch_size", {"per_device_train_batch_size": 0}),
    ("truncation_mode", {"truncation_mode": "keep_middle"}),
    ("attributes", {"attributes": ["helpful"]}),
    ("attributes", {"attributes": ["helpful", "helpful"]}),
    ("attribute_weights", {"attributes": NAMES, "attribute_weights": [1.0]}),
    ("attribute_weights", {"attributes": NAMES, "attribute_weights": [1.0, math.nan]}),
    ("attribute_loss_weights", {"attributes": NAMES, "attribute_loss_weights": [1.0, 0.0]}),
    ("attribute_weights", {"attribute_weights": [1.0, 1.0]}),
    ("average_over", {"attributes": NAMES, "average_over": "comparisons"}),
    ("activation_checkpointing=False", {"remat": "dots", "gradient_checkpointing": False}),
    ("activation_checkpointing=True", {"remat": "none", "activation_checkpointing": True}),
    ("use_reentrant", {"remat": "dots", "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    ("scan_layers", {"scan_layers": True}),
    ("save_only_model", {"save_only_model": True, "resume_from_checkpoint": "auto"}),
    ("train_sampling_strategy", {"group_by_prompt": True, "train_sampling_strategy": "sequential"}),
    *(("training_time_limit", {"training_time_limit": value}) for value in (*NO_DURATIONS, "٢h", "h", 90, True)),
    ("optim_state_dtype", {"optim_state_dtype": "bfloat16", "optim": "sgd"}),
    ("reshard_after_forward=False.*mesh=", {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}),
    ("HYBRID_SHARD.*mesh=", {"fsdp": "hybrid_shard", "fsdp_config": {"version": 1}}),
    ("cpu_offload=.*leave cpu_offload", {"fsdp": "full_shard offload"}),
    ("learning_rate_end", END | {"lr_scheduler_type": "polynomial"}),
    ("learning_rate_end", END | {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"min_lr": 1e-5}}),
    ("learning_rate_end", END | {"learning_rate_end": -1e-4}),
    # the message suggests the nearest possible batch size
    (r"total_batch_size=24.* 25\b", TOTAL | {"gradient_accumulation_steps": 5}),
    (r"total_batch_size=24.* 32\b", TOTAL | {"per_device_train_batch_size": 16}),
    (r"total_batch_size=24.* 50\b", TOTAL | {"per_device_train_batch_size": 50}),
    (r"total_batch_size=24.* 16\b", TOTAL | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}),
    *(("save_interval_minutes", {"save_interval_minutes": value}) for value in (-5.0, math.nan)),
]


@pytest.mark.parametrize(("name", "settings"), BAD_SETTINGS)
def test_bad_settings_are_rejected_by_name(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=name):
        RewardConfig("out", bf16=False, report_to="none", **settings)


COPIED = [
    {},
    {"eos_token": "<eos>", "own_pad_token": True, "total_batch_size": 32, "remat": "none", "report_to": None},
    {"accelerator_config": {"split_batches": True}, "lr_scheduler_kwargs": {"num_cycles": 1}},
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("settings", COPIED, ids=["defaults", "others", "mappings"])
def test_configs_made_from_a_configs_fields_are_equal_and_do_not_warn(settings: dict[str, Any]) -> None:
    config = RewardConfig("out", bf16=False, **{"report_to": "none", **settings})
    for copied in (RewardConfig(**config.to_dict()), dataclasses.replace(config)):
        assert copied.to_dict() == config.to_dict()
    assert config.report_to == []


BEST = {"eval_strategy": "epoch", "metric_for_best_model": "f1"}


USELESS = [
    ("eval_steps", "eval_strategy", {"eval_steps": 5}),
    ("warmup_steps", "lr_scheduler_type", {"warmup_steps": 5, "lr_scheduler_type": "constant"}),
    ("adam_beta2", "optim", {"adam_beta2": 0.95, "optim": "sgd"}),
    ("truncation_mode", "max_length", {"truncation_mode": "keep_end", "max_length": None}),
    ("lora_r", "use_peft", {"lora_r": 8}),
]


@pytest.mark.parametrize(("setting", "other", "given"), USELESS)
def test_setting_without_condition_warns(setting: str, other: str, given: Any, tmp_path: Path, caplog: Any) -> None:
    def make(**given: Any) -> str:
        caplog.clear()
        kind: Any = ModelConfig if "lora_r" in given else RewardConfig
        kind(**given) if kind is ModelConfig else kind(str(tmp_path), report_to="none", bf16=False, **given)
        return caplog.text

    met = {"eval_strategy": "steps", "lr_scheduler_type": "linear", "optim": "adamw_torch", "max_length": 8}
    told = make(**given)
    assert f"{setting}=" in told and f" {other}=" in told
    assert make(**given | {other: (met | {"use_peft": True})[other]}) == ""


def test_defaults_draw_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RewardConfig(str(tmp_path), report_to="none", bf16=False, gradient_checkpointing=False)
    ModelConfig()
    assert caplog.text == ""


def test_unknown_best_metric_is_rejected_before_training(make_trainer: Any) -> None:
    class Measuring(TrainerCallback):
        pass

    stopping = EarlyStoppingCallback()
    for arguments in ({}, {"callbacks": [stopping]}, {"eval_dataset": {"a": PAIRS}}):
        with pytest.raises(UserError, match="metric_for_best_model='f1'"):
            make_trainer(BEST, **{"eval_dataset": PAIRS} | arguments)
    with pytest.raises(UserError, match="metric_for_best_model='loss'.*a_loss"):
        make_trainer({**BEST, "metric_for_best_model": "loss"}, eval_dataset={"a": PAIRS})
    make_trainer({**BEST, "metric_for_best_model": "eval_a_accuracy"}, eval_dataset={"a": PAIRS, "b": PAIRS})
    make_trainer(BEST, eval_dataset=PAIRS, compute_metrics=lambda _: {"f1": 1.0})
    make_trainer(BEST, eval_dataset=PAIRS, callbacks=[Measuring])
    make_trainer({"metric_for_best_model": "f1"})  # without evaluation no metric is needed


def test_users_tokenizer_and_data_are_never_modified(model_and_tokenizer: tuple[Any, Any], make_trainer: Any) -> None:
    tokenizer = copy.deepcopy(model_and_tokenizer[1])
    with pytest.raises(ValueError):
        make_trainer({"eos_token": "<pad>"}, processing_class=tokenizer, eval_dataset=EMPTY)
    make_trainer({"eos_token": "<pad>"}, processing_class=tokenizer)
    assert tokenizer.special_tokens_map == model_and_tokenizer[1].special_tokens_map
    assert PAIRS.column_names == ["prompt", "chosen", "rejected"]


def test_evaluate_and_predict_check_token_ids(make_trainer: Any) -> None:
    trainer = make_trainer(train_dataset=token_pairs(303, 0))  # the largest id of the model's vocabulary
    for call, name in ((trainer.evaluate, "eval"), (trainer.predict, "test")):
        with pytest.raises(ValueError, match=f"Row 2 .*{name}.*304"):
            call(token_pairs(304))


def test_eos_equal_to_the_pad_token_is_logged(model_and_tokenizer: Any, make_trainer: Any, caplog: Any) -> None:
    tokenizer = copy.deepcopy(model_and_tokenizer[1])
    tokenizer.pad_token = tokenizer.eos_token
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        make_trainer()
        assert "own_pad_token" not in caplog.text
        make_trainer(processing_class=tokenizer)
    assert "own_pad_token" in caplog.text


# ---- declarations


def test_every_setting_is_declared() -> None:
    """Declare a new field in `trl_tpu.config.checks`. It belongs to a run if a resume with another value differs."""
    names = {item.name for config in (PRMConfig, ModelConfig) for item in fields(config)}
    assert names - SETTINGS.keys() == {*REMOVED}, "undeclared settings"
    assert SETTINGS.keys() - names == set(), "declared settings that no config has"
    wheres = {where for setting in SETTINGS.values() for no in setting.rejected for where in no.where.split()}
    conditions = {where for where in wheres if where not in CIRCUMSTANCES} | {each.needs for each in SETTINGS.values()}
    assert {condition.partition("=")[0] for condition in conditions} <= {*names, "remat_policy", ""}


def test_settings_of_a_run_are_told_from_those_that_may_change(tmp_path: Any) -> None:
    @dataclass
    class Own(RewardConfig):
        temperature: float = 1.0
        note: str = ""
        may_change_on_resume = RewardConfig.may_change_on_resume | {"note"}

    settings = Own(str(tmp_path), temperature=2.0, model_init_kwargs={"token": "hf_secret"}).identifying_settings()
    assert settings["temperature"] == 2.0 and "note" not in settings and "hf_secret" not in str(settings)
    own = {"learning_rate", "seed", "loss_type", "optim", "bf16", "max_length", "model_init_kwargs"}
    assert own <= settings.keys()
    assert not settings.keys() & {"output_dir", "logging_steps", "mesh", "packing", "total_batch_size", *REMOVED}
