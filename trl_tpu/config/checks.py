"""Declarations of settings, and the checks by them before anything is loaded.

A declaration holds valid values, reasons for rejection, needs, and whether a setting belongs to a run. Each setting is
declared once below, also if it is inherited from transformers. The groups are the sections of `--help all`. An
undeclared setting, such as a subclass's field, belongs to a run.
"""

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

from .. import runtime
from ..compat.arguments import TrainingArguments as TrainingArguments  # pickles of earlier versions name this module
from ..errors import UserError

logger = logging.getLogger(__name__)

#: Circumstances of `No`, with the reason in the error. The runtimes are "xla", "torchtpu" and "native". The kinds of
#: rows are "pairs", "answers" and "solutions"; rankings use all settings of the loss.
CIRCUMSTANCES = {
    "always": "not supported",
    **dict.fromkeys(("xla", "torchtpu", "native"), "impossible on {runtime}"),
    "unscanned": "impossible on PyTorch/XLA without scan_layers",
    "ranks": "impossible with a mesh over processes",
    "loop": "impossible without RewardTrainer's loop",
    "pairs": "not for pairs",
    "answers": "not for single answers",
    "solutions": "not for process rewards",
}


class No(NamedTuple):
    """Circumstances in which a setting is rejected.

    Attributes:
        where: Names in `CIRCUMSTANCES`, and conditions on other settings in the form of `holds`.
        advice: Words for a remedy. By default: leave the setting out, or change the other setting.
        value: Regular expression to search for in the rejected values. By default all that turn the setting on.
    """

    where: str
    advice: str = ""
    value: str = ""


class Setting(NamedTuple):
    """Rules of a setting.

    Attributes:
        group: Section of the help.
        changes_run: Whether the setting belongs to the identity of a run. Others may change on a resume.
        rejected: Circumstances in which the setting is rejected.
        valid: Valid values, in words and as a function of the value. By default all.
        needs: Condition without which the setting has no effect, in the form of `holds`. It draws a warning.
    """

    group: str
    changes_run: bool
    rejected: tuple[No, ...]
    valid: tuple[str, Callable[[Any], bool]] | None
    needs: str


SETTINGS: dict[str, Setting] = {}

#: Whole numbers of days, hours and minutes, such as "2h30m".
DURATION = re.compile(
    r"(?=.)(?:(?P<days>[1-9][0-9]{0,5})d)?(?:(?P<hours>[1-9][0-9]{0,5})h)?(?:(?P<minutes>[1-9][0-9]{0,5})m)?"
)


def _declare(group: str, changes_run: bool, names: str, *rejected: No, valid: Any = None, needs: str = "") -> None:
    SETTINGS.update(dict.fromkeys(names.split(), Setting(group, changes_run, rejected, valid, needs)))


def _at_least(minimum: int) -> tuple[str, Callable[[Any], bool]]:
    return f"at least {minimum}, or be left out", lambda value: value is None or value >= minimum


def _is_duration(value: Any) -> bool:
    return value is None or DURATION.fullmatch(str(value)) is not None


def _one_of(*values: str | None) -> tuple[str, Callable[[Any], bool]]:
    return f"one of {', '.join(map(repr, values))}", lambda value: value in values


_PLAIN_TORCH = "train on plain torch with USE_TORCH_XLA=0"
_BY_MESH = No("ranks", "leave it out: mesh shards the model")
_NO_LOOP = No("loop", "leave it out, or use RewardTrainer")
_NOT_SHARDED = No("resume_from_checkpoint=^auto$ log_grad_norms=True")

# ---- settings that belong to the identity of a run

_add = partial(_declare, "Model", True)
_add("model_name_or_path model_revision dtype attn_implementation torch_dtype model_init_kwargs disable_dropout")
_add("frozen_parameters train_unread_towers eos_token own_pad_token")
_add("neftune_noise_alpha", No("xla", f"leave it out, or {_PLAIN_TORCH}"), valid=_at_least(0))
_add("use_liger_kernel", No("xla", "leave it out: its Triton kernels are for GPUs, and XLA fuses operations itself"))
_add("liger_kernel_config", needs="use_liger_kernel=True")

_add = partial(_declare, "Adapters", True)
_add("use_peft lora_task_type load_in_8bit load_in_4bit")
_add("lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters", needs="use_peft=True")
_add("lora_modules_to_save use_rslora use_dora", needs="use_peft=True")
_add("bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage", needs="load_in_4bit=True")

_add = partial(_declare, "Data", True)
_add("seed data_seed full_determinism dataloader_drop_last remove_unused_columns ignore_data_skip group_by_prompt")
_add("max_length", valid=_at_least(1))
_add("truncation_mode", No("solutions"), valid=_one_of("keep_start", "keep_end", None), needs="max_length=^[0-9]")
_add(
    "train_sampling_strategy",
    No("xla", "leave it out: every batch has the same number of rows", "batch_rebalance"),
    No("ranks", "leave it out: all processes must use the same order", "group_by_length|batch_rebalance"),
    No("group_by_prompt=True", value="sequential|group_by_length|batch_rebalance"),
)
_add("length_column_name", needs="train_sampling_strategy=group_by_length")
_add(
    "accelerator_config",
    No("ranks", "leave use_seedable_sampler on: processes need the same order", "use_seedable_sampler=False"),
    No("ranks", "leave split_batches out, and set total_batch_size", "split_batches=True"),
)
_add("dataloader_in_order", No("xla", "leave it out: all hosts must use the same batches", "False"))

_add, _kinds = partial(_declare, "Loss", True), "pairs answers solutions"  # the kinds besides rankings
_not_sigmoid, _learns_ties = "loss_type=^(?!sigmoid)", "ties=davidson|rao_kupper"
_add(
    "loss_type",
    *(No("pairs solutions", value="plackett_luce|regression"), No("answers", value="plackett_luce")),
    valid=_one_of("sigmoid", "plackett_luce", "regression"),
)
_add(
    "average_over",
    No(f"{_kinds} attributes {_not_sigmoid}", value="comparisons"),
    valid=_one_of("prompts", "comparisons"),
)
_add("ranking_top_k", No(f"{_kinds} loss_type=^(?!plackett_luce)"), valid=_at_least(1))
_add("margin_scale", No(f"{_kinds} {_not_sigmoid} {_learns_ties}"))
_add(
    "label_smoothing",
    No(f"solutions {_not_sigmoid} {_learns_ties}"),
    valid=("at least 0 and below 0.5", lambda value: 0 <= value < 0.5),
)
_add(
    "ties",
    *(No(_kinds), No(_not_sigmoid, value="davidson|rao_kupper")),
    valid=_one_of("skip", "davidson", "rao_kupper", None),
)
_add(
    "tie_threshold",
    No(f"{_kinds} ties=^(?!davidson|rao_kupper)", value=r"^(?!1(\.0)?$)"),
    valid=("a number above 0", lambda value: 0 < value < math.inf),
)
_add("label_smoothing_factor center_rewards_coefficient attributes", No("solutions"))
_add("attribute_weights attribute_loss_weights train_on_last_step_only max_completion_length")
_add("step_separator", No("solutions", value="^None$"))
_add("neutral_steps", valid=_one_of("ignore", "wrong", None))

_add, _adam = partial(_declare, "Optimizer", True), "use optim='adamw_torch'"
_add("learning_rate lr_scheduler_kwargs weight_decay max_grad_norm max_steps")
_other_end = "lr_scheduler_type=^(?!(linear|cosine)$) lr_scheduler_kwargs=lr_end|min_lr"
_add("learning_rate_end", No(_other_end, value="^(?!None$)"), valid=_at_least(0))
_add("num_train_epochs nonfinite_limit", valid=_at_least(0))
_add("gradient_accumulation_steps", valid=_at_least(1))
_add("lr_scheduler_type", _NO_LOOP._replace(value="reduce_lr_on_plateau|greedy"))
_add("warmup_steps", needs="lr_scheduler_type=^(?!constant$|reduce|greedy)")
_add(
    "optim",
    No("xla", f"{_adam}: XLA fuses it automatically", "(apex|npu)_fused"),
    No("xla", f"{_adam}, since bitsandbytes needs CUDA, or {_PLAIN_TORCH}", "bit|bnb|ademamix"),
    No("xla", f"{_adam}: these optimizers update unsharded weights inside the backward pass", "layerwise|lomo"),
    No("ranks", f"{_adam}: it can update each process's shards", "bit|bnb|ademamix|layerwise|lomo"),
    No("optim_state_dtype", f"{_adam}, or leave optim_state_dtype out", "^(?!adamw_torch(_fused)?$)"),
)
_add("optim_args", needs="optim=^(?!adamw_torch|ada(factor|lomo)|lomo)")
_add("adam_beta1 adam_beta2 adam_epsilon", needs="optim=^(?!sgd|ada(grad|factor|lomo)|rmsprop|lomo)")
_add("optim_target_modules", needs="optim=galore|apollo")
_add("optim_state_dtype", valid=_one_of("bfloat16", None))

_add = partial(_declare, "Devices and memory", True)
_add("bf16 tf32")
_add(
    "fp16",
    No("xla", "use bf16=True: XLA devices have no float16 loss scaling"),
    No("ranks", "use bf16=True: float16 loss scaling would skip steps in only some of the processes"),
    No("log_grad_norms=True"),
)
_add(
    "torch_compile torch_compile_backend torch_compile_mode",
    No("xla torchtpu", "leave it out: steps are compiled"),
    No("ranks", "leave it out: compiled layers were not tested in shards"),
)
_add("deepspeed", No("xla", "shard with mesh='fsdp=-1' (ZeRO-3)"), _BY_MESH, _NOT_SHARDED, _NO_LOOP)
_add(
    "auto_find_batch_size",
    No("xla", "set per_device_train_batch_size: every size that it tries needs another compilation"),
    *(No("ranks", "set per_device_train_batch_size: processes would try different sizes"), _NO_LOOP),
)
_add("restore_callback_states_from_checkpoint")

# ---- settings that may change when a run is resumed

_add = partial(_declare, "Folders and the Hub", False)
_add("output_dir", valid=("a folder or a new name", lambda name: name is None or not os.path.isfile(name)))
_add("output_url run_name hub_model_id hub_token hub_private_repo hub_revision")
_add("push_to_hub", _NO_LOOP)
_add("hub_strategy hub_always_push", needs="push_to_hub=True")

_add = partial(_declare, "Logs", False)
_add("disable_tqdm log_level log_level_replica log_on_each_node log_grad_norms logging_first_step")
_add("logging_nan_inf_filter logging_strategy")
_add("skip_memory_metrics", _NO_LOOP._replace(value="False"))
_add("report_to", _NO_LOOP)
_add("project trackio_space_id trackio_bucket_id trackio_static_space_id", needs="report_to=trackio")
_add("logging_steps", needs="logging_strategy=steps")
_add("progress", No("loop", "print what `log` and `evaluate` return", "json"), valid=_one_of("bar", "json"))
_add("include_num_input_tokens_seen", No("xla", "read num_tokens in the logs: it is counted without waiting"))
_add("debug", No("xla", "leave it out: it would wait for the device; nonfinite_limit checks each step", "underflow"))

_add = partial(_declare, "Checkpoints and stops", False)
_add("save_strategy save_total_limit save_on_each_node")
_add("save_steps", No("always", "leave it out, or set save_strategy='no'", "None"), needs="save_strategy=steps")
_add("save_interval_minutes", _NO_LOOP, valid=_at_least(0))
_add("save_only_model", No("resume_from_checkpoint=^auto$"))
_add("enable_jit_checkpoint", No("xla", "leave it out: a SIGTERM to any host already saves and stops"), _NO_LOOP)
_add("load_best_model_at_end resume_from_checkpoint", _NO_LOOP)
_add("training_time_limit", _NO_LOOP, valid=("a duration such as '2h30m', '1d' or '90m'", _is_duration))
_add("metric_for_best_model", needs="eval_strategy=steps|epoch")
_add("greater_is_better", needs="metric_for_best_model=^(?!None)")

_add = partial(_declare, "Evaluation", False)
_add("do_train do_eval do_predict eval_strategy eval_accumulation_steps eval_use_gather_object label_names")
_add("prediction_loss_only batch_eval_metrics")
_add("eval_steps", needs="eval_strategy=steps")
_add("eval_delay", needs="eval_strategy=steps|epoch")
_add("eval_on_start", _NO_LOOP)
_add("eval_by", No("solutions train_sampling_strategy=group_by_length"))
_add("max_eval_steps per_device_eval_batch_size", valid=_at_least(1))
_add("eval_do_concat_batches", No("always", "leave it out: compute_metrics receives one array of all rows", "False"))
_add("include_for_metrics", No("always", "take inputs from the evaluation data: predictions have its order", "inputs"))
_add("bf16_full_eval", No("xla ranks", "leave it out: with bf16=True evaluation already runs in bfloat16"), _NO_LOOP)
_add("fp16_full_eval", No("xla ranks", "leave it out: evaluation runs in the training precision"), _NO_LOOP)

_add = partial(_declare, "Data", False)
_add("dataset_num_proc", valid=_at_least(1))
_add("dataloader_num_workers", valid=_at_least(0))
_add("dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor")
_add("dataloader_multiprocessing_context")
_add("chat_template_path pad_token trust_remote_code")  # recorded as the tokenizer

_add = partial(_declare, "Batches", False)  # a checkpoint records the global batch, and whether it is packed
_add("per_device_train_batch_size total_batch_size max_shapes pad_to_multiple_of", valid=_at_least(1))
_add("packing", valid=_one_of("auto", "true", "false"))
_add("row_length", valid=_at_least(1), needs="packing=auto|true")
_add("packed_attention", valid=_one_of("auto", "masks", "expanded"), needs="packing=auto|true")

_add = partial(_declare, "Devices and memory", False)  # with equal math
_add("mesh local_rank fsdp_config ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters")
_add("ddp_static_graph ddp_timeout average_tokens_across_devices use_cache")
_add("gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing")
_add(
    "use_cpu",
    No("xla", f"set the environment variable PJRT_DEVICE=CPU for XLA on the CPU, or {_PLAIN_TORCH}"),
    No("torchtpu", "set the environment variable ACCELERATE_USE_CPU=1 for plain torch on the CPU"),
)
_add("sharding_plan", No("ranks", "leave it out: transformers shards by its own plan"))
_add("fsdp", No("xla", "shard with mesh='fsdp=-1'"))
_add("parallelism_config", No("xla mesh", "arrange the devices with mesh"))
_add(
    "activation_checkpointing_kwargs",
    No("xla", "leave out torch's options offload and context_fn", "'(offload|context_fn)': (?!None|False)"),
    No("remat=dots", "leave out options that remat sets", "'(use_reentrant|context_fn)': (?!None|False)"),
    needs="activation_checkpointing=True",
)
_add(
    "remat",
    No("activation_checkpointing=True", "leave gradient_checkpointing out", "none"),
    No("activation_checkpointing=False", "leave gradient_checkpointing out, or set remat='none'", "full|dots"),
    valid=_one_of("full", "dots", "none", None),
)
_add(
    "scan_layers",
    No("torchtpu native", "leave it out: it is for PyTorch/XLA"),
    No("remat_policy=none", "leave gradient_checkpointing out, and set remat='full' or remat='dots'"),
)
_offload = "set scan_layers=True; otherwise the TPU's compiler (libtpu 0.0.21) offloads, but needs more memory"
_add("activation_offloading", No("unscanned", _offload))
_add("torch_empty_cache_steps", No("xla", "leave it out: XLA plans memory when it compiles"))

# ---- checks


def holds(args: Any, condition: str) -> bool:
    """Return whether a setting meets a condition.

    Args:
        args: The settings.
        condition: NAME=PATTERN, with a regular expression to search for in the value. NAME alone is met by any value
            that turns the setting on.
    """
    name, _, pattern = condition.partition("=")
    value = _value(args, name)
    return bool(re.search(pattern, str(value)) if pattern else value and value != "no")


def check_limits(args: Any, *circumstances: str) -> None:
    """Reject settings that some circumstances, or other settings, rule out.

    Args:
        args: The settings to check.
        circumstances: Names in `CIRCUMSTANCES` that apply. "always" and conditions on other settings apply anyway.

    Raises:
        UserError: With the setting, its value, the reason and the advice.
    """
    for name, where, advice in _rejected(args, {"always", *circumstances}):
        reason, default = CIRCUMSTANCES.get(where, "").format(runtime=runtime.current().name), "leave it out"
        if not reason:
            other = where.partition("=")[0]
            reason, default = f"impossible with {_shown(args, other)}", f"leave it out, or change {other}"
        raise UserError(f"{_shown(args, name)} is {reason}: {advice or default}.")


def unused_settings(args: Any, kind: str) -> list[str]:
    """Return the given settings that have no meaning for a kind of rows, as "NAME=VALUE".

    Args:
        args: The settings.
        kind: "pairs", "answers" or "solutions". Rankings use all settings of the loss.
    """
    return [_shown(args, name) for name, where, _ in _rejected(args, {kind}) if where == kind]


def _rejected(args: Any, circumstances: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, circumstance or condition, and advice for each rejected setting."""
    for name, setting in SETTINGS.items():
        for where, advice, value in setting.rejected:
            for each in where.split():
                applies = each in circumstances if each in CIRCUMSTANCES else holds(args, each)
                if applies and holds(args, f"{name}={value}"):
                    yield name, each, advice


def _value(args: Any, name: str) -> Any:
    """Return the value of a setting; of an enum's member its text."""
    return getattr(value := getattr(args, name), "value", value)


def _shown(args: Any, name: str) -> str:
    return re.sub(r"\s*\n\s*", " ", f"{name}={_value(args, name)!r}")  # accelerate's objects have several lines


def warn_of_unmet_needs(args: Any) -> None:
    """Warn of each setting in the dataclass ``args`` that has no effect: the condition that it needs is not met."""
    for setting, default in ((item.name, item.default) for item in fields(args) if item.name in SETTINGS):
        need = SETTINGS[setting].needs
        if need and _value(args, setting) != default and not holds(args, need):
            other = need.partition("=")[0]
            # a pattern with ^ is not a value to set
            change = f"change {other}" if "^" in need else f"set {need}"
            logger.warning("%s has no effect with %s: %s.", _shown(args, setting), _shown(args, other), change)


def check_values(args: Any) -> None:
    """Reject invalid values.

    Raises:
        UserError: With the setting, its value and the rule.
    """
    for setting, (_, _, _, valid, _) in SETTINGS.items():
        if valid is not None and hasattr(args, setting) and not valid[1](value := getattr(args, setting)):
            raise UserError(f"{setting} must be {valid[0]}, got {value!r}.")
    names, weights, loss_weights = args.attributes or [], args.attribute_weights, args.attribute_loss_weights
    # one count for names, distinct names and weights: 0 without attributes, otherwise at least 2
    counts = {len(values) for values in (names, set(names), weights, loss_weights) if values is not None}
    is_finite = math.isfinite(sum([*(weights or []), *(loss_weights or [])]))
    if counts not in ({0}, {max(2, len(names))}) or not is_finite or not min(loss_weights or [1.0]) > 0:
        raise UserError(
            f"attributes={names} must be at least two different names, attribute_weights={weights} one finite number "
            f"per attribute, and attribute_loss_weights={loss_weights} one positive finite number per attribute."
        )


def check_one_gpu(count: int) -> None:
    """Raise UserError if a process would use several GPUs by `nn.DataParallel`, as transformers does."""
    if count > 1:
        raise UserError(
            f"One process sees {count} GPUs, and nn.DataParallel is not supported. Launch one process per GPU "
            "(torchrun --nproc_per_node=...), or make one GPU visible (CUDA_VISIBLE_DEVICES=0)."
        )


def warn_of_high_learning_rate(args: Any, model: Any) -> None:
    """Warn if a full model is trained at TRL's default learning rate. That rate is meant for adapters."""
    if args.learning_rate == 1e-4 and model.num_parameters(only_trainable=True) > model.num_parameters() / 2:
        logger.warning(
            "learning_rate=1e-4, TRL's default, is for adapters (--use_peft) and much too high for a full model. "
            "Common rates: 1e-5 for 0.5B, 2e-6 for 1B, 2e-6 to 9e-6 for 8B parameters."
        )
