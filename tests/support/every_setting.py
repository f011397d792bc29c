"""Every field of `RewardConfig` is applied, rejected, or listed in a guide.

A field in none of the tables, such as a new one of transformers, must be read by a run.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
import torch
import transformers
from environment import EXAMPLES
from training import trained
from transformers import EvalPrediction, TrainerCallback

import trl_tpu
from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.compat.arguments import REMOVED
from trl_tpu.config.checks import SETTINGS
from trl_tpu.data.trl_dict import DataCollatorForPreference
from trl_tpu.errors import UserError
from trl_tpu.runtime import current


def _names(text: str) -> set[str]:
    return set(text.split())


#: Read when the config is created.
AT_THE_START = _names("""
    ddp_backend ddp_timeout deepspeed fp16 fsdp fsdp_config gradient_checkpointing gradient_checkpointing_kwargs mesh
    total_batch_size sharding_plan tf32 torch_compile use_cpu
""")
#: File or package -> fields that it reads only with a Hub, a tracker, a kernel or certain rows.
ELSEWHERE = {
    "transformers/trainer.py": (
        "hub_always_push hub_private_repo hub_revision hub_strategy hub_token length_column_name liger_kernel_config"
    ),
    "transformers/integrations/integration_utils.py": (
        "project run_name trackio_bucket_id trackio_space_id trackio_static_space_id"
    ),
    "transformers/trainer_optimizer.py": "optim_target_modules",
    "trl_tpu": (
        "attribute_loss_weights attribute_weights attributes average_over do_eval eval_accumulation_steps "
        "label_smoothing loss_type margin_scale max_shapes packed_attention pad_to_multiple_of ranking_top_k "
        "row_length tie_threshold ties"
    ),
}
LISTED = _names("""
    average_tokens_across_devices do_predict do_train eval_use_gather_object label_names
    label_smoothing_factor local_rank resume_from_checkpoint
""")
LISTED_ON_XLA = _names("""
    dataloader_pin_memory ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph ddp_timeout log_on_each_node logging_nan_inf_filter
""")


def _rejected(where: str) -> dict[str, str]:
    """Return the advice for each rejected setting, as NAME or NAME=PATTERN."""
    rules = [(name, rule) for name, setting in SETTINGS.items() for rule in setting.rejected]
    rules = [(name, rule) for name, rule in rules if where in rule.where.split()]
    return {f"{name}={rule.value}".rstrip("="): rule.advice for name, rule in rules}


ALWAYS, ON_XLA = _rejected("always"), _rejected("xla")
#: Values of rejected settings.
ASKED: dict[str, Any] = dict.fromkeys(ALWAYS | ON_XLA, True) | {
    "include_for_metrics=inputs": ["loss", "inputs"],
    "eval_do_concat_batches=False": False,
    "save_steps=None": None,
    "fsdp": "full_shard",
    "deepspeed": {"zero_optimization": {"stage": 3}},
    "parallelism_config": {"dp_replicate_size": 2},
    "torch_compile_backend": "inductor",  # also enables torch_compile, like torch_compile_mode
    "torch_compile_mode": "default",
    "include_num_input_tokens_seen": "all",
    "neftune_noise_alpha": 5.0,
    "torch_empty_cache_steps": 10,
    "train_sampling_strategy=batch_rebalance": "batch_rebalance",
    "dataloader_in_order=False": False,
    "debug=underflow": "underflow_overflow",
    "optim=(apex|npu)_fused": "adamw_apex_fused",
    "optim=bit|bnb|ademamix": "paged_adamw_8bit",
    "optim=layerwise|lomo": "adalomo",
    "activation_checkpointing_kwargs='(offload|context_fn)': (?!None|False)": {"offload": True},
}
#: Rejected with every value except the default.
REJECTED = ["eval_do_concat_batches"]
REJECTED_ON_XLA = [key.partition("=")[0] for key in ON_XLA]
OTHERS = {*AT_THE_START, *_names(" ".join(ELSEWHERE.values())), *LISTED, *REJECTED, *REMOVED}
#: Read by a run that trains, evaluates, saves, loads its best model, resumes within an epoch and predicts.
IN_A_RUN = {field.name for field in dataclasses.fields(RewardConfig)} - OTHERS


def check_fields_read_elsewhere_and_listed_fields(_: Path) -> None:
    assert {field.name for field in dataclasses.fields(RewardConfig)} >= OTHERS
    guide = (EXAMPLES / "guides" / "differences_from_trl.md").read_text()
    section = guide.partition("## Settings that change nothing here")[2].partition("\n## ")[0]
    everywhere, on_xla = section.split("On PyTorch/XLA also:")
    assert [name for name in LISTED if f"`{name}`" not in everywhere] == []
    found = {name for name in LISTED_ON_XLA if f"`{name}`" in on_xla or ("`ddp_`" in on_xla and name[:4] == "ddp_")}
    assert found == LISTED_ON_XLA
    for file, names in ELSEWHERE.items():
        package = transformers if file.startswith("transformers") else trl_tpu
        path = Path(str(package.__file__)).parent.parent / file
        files = [each for each in path.rglob("*.py") if each.parent.name != "config"] or [path]
        source = "\n".join(each.read_text(encoding="utf-8") for each in files)
        unread = [name for name in _names(names) if not re.search(rf"args\.{name}\b|^    {name}: ", source, re.M)]
        assert unread == [], file


def check_settings_are_rejected(folder: Path) -> None:
    """The error suggests the alternative in the table."""
    assert ASKED.keys() == (ALWAYS | ON_XLA).keys()
    for key, instead in (ALWAYS | (ON_XLA if current().is_spmd else {})).items():
        setting = key.partition("=")[0]
        with pytest.raises(UserError, match=rf"^{setting}=.*: {re.escape(instead)}\.$"):
            RewardConfig(str(folder), **{setting: ASKED[key]})


# ---- a run, and the arguments of its trainer


class Recording(RewardConfig):
    """Records the settings that are read."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        Recording.read.add(name)
        return super().__getattribute__(name)


def check_run_reads_settings_and_calls_arguments(folder: Path) -> None:
    on_xla = current().is_spmd
    skipped = {*REJECTED_ON_XLA, *LISTED_ON_XLA} if on_xla else set()
    pairs = tiny.made_up_pairs(16)
    tokenizer = tiny.tiny_tokenizer(pairs)
    called: set[str] = set()

    class Noting(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            called.add("callbacks")

    class Collator(DataCollatorForPreference):
        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            called.add("data_collator")
            return super().torch_call(examples)

    def preprocess(rewards_P2: torch.Tensor, labels_P: torch.Tensor) -> torch.Tensor:
        called.add("preprocess_logits_for_metrics")
        return rewards_P2

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        called.add("compute_metrics")
        return {"own": 1.0}

    Recording.read.clear()
    settings: dict[str, Any] = {"max_steps": 2, "save_steps": 1, "logging_steps": 1, "load_best_model_at_end": True}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "bf16": False, "report_to": "none", "disable_tqdm": True}
    args = Recording(str(folder), per_device_train_batch_size=8, per_device_eval_batch_size=8, **settings)
    unread = AT_THE_START - Recording.read
    assert not unread, unread
    Recording.read.clear()

    def make() -> RewardTrainer:
        data = {"train_dataset": pairs, "eval_dataset": pairs.select(range(8)), "processing_class": tokenizer}
        calls = {"compute_metrics": compute_metrics, "preprocess_logits_for_metrics": preprocess}
        return RewardTrainer(
            tiny.tiny_model(tokenizer), args, Collator(pad_token_id=0), **data, **calls, callbacks=[Noting()]
        )

    make().train()
    trainer = trained(make(), resume=str(folder / "checkpoint-1"))
    trainer.predict(pairs)
    unread = IN_A_RUN - skipped - Recording.read
    assert not unread, f"Find where these are applied; else reject them, or list them in the guide: {unread}"
    assert called == {"callbacks", "data_collator", "preprocess_logits_for_metrics", "compute_metrics"}
    assert trainer.args is args


CHECKS: list[Callable[[Path], None]] = [
    check_fields_read_elsewhere_and_listed_fields,
    check_settings_are_rejected,
    check_run_reads_settings_and_calls_arguments,
]
