"""The API is that of the installed trl, but for the differences that are listed here with their reasons.

Each area lists its differences as texts. A new one (from a later trl, say) fails until it is listed; so does a listed
one that is gone.
"""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import operator
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trl

import trl_tpu
from trl_tpu.config.checks import RemovedArguments
from trl_tpu.errors import UserError

_OLD = "scripts for older versions of TRL give it, or import it"
_REMOVED = dataclasses.fields(RemovedArguments)
# TRL's for other ways of training, for generating, for images and other forms of data, or to decorate the progress bar
_NOT_OF_REWARDS = (
    *("Callback", "Config", "Trainer", "_model", "_dataset", "_schema", "_messages", "_calling"),
    *("get_training_chat_template", "_from_value", "_chatml"),
)
_INTERNAL = "a part of the trainer's own structure, beside TRL's API"

INTENDED: dict[str, dict[str, str]] = {
    "RewardConfig's fields": {
        "default of optim: 'adamw_torch_fused', ours 'adamw_torch'": (
            "the fused kernel does not exist on XLA; the update rule is the same"
        ),
        "type of optim: transformers.training_args.OptimizerNames | str, ours <class 'str'>": (
            "a text reads the same on a command line; an enum is accepted as before"
        ),
        "ours alone: mesh = None": "how devices or processes are arranged, which TRL leaves to accelerate",
        "ours alone: sharding_plan = None": "which weight goes over which mesh axis, a file of patterns",
        "ours alone: remat = None": "what gradient_checkpointing computes again: TRL's is 'full'",
        "ours alone: scan_layers = False": "compiles deep models as fast as shallow ones",
        "ours alone: own_pad_token = False": "the eos is scored, as by servers that score the very last token",
        "ours alone: nonfinite_limit = 3": "a NaN in one batch does not end a run's weights",
        "ours alone: packing = 'auto'": "computes what a pair's dialogues share once, which TRL computes twice",
        "ours alone: row_length = None": "packed rows on XLA have a length that is compiled",
        "ours alone: packed_attention = 'auto'": "packed rows on XLA attend through masks or a kernel",
        "ours alone: max_shapes = 4": "each shape of batch is compiled on XLA",
        "ours alone: training_time_limit = None": "saves and stops in time, for machines that are lent for a while",
        "ours alone: save_interval_minutes = None": "what may be lost, as time instead of steps",
        "default of per_device_train_batch_size: 8, ours None": "not given, until made: total_batch_size may decide",
        "ours alone: total_batch_size = None": "pairs of an update, the same on any number of devices",
        "ours alone: group_by_prompt = False": "what pairs of a prompt share is computed once, in one batch",
        "ours alone: loss_type = 'sigmoid'": "of rankings, which TRL does not take",
        "ours alone: average_over = 'prompts'": "of rankings",
        "ours alone: ranking_top_k = None": "of rankings",
        "ours alone: margin_scale = None": "of rankings",
        "ours alone: ties = None": "of rankings",
        "ours alone: attributes = None": "of rankings that several attributes grade",
        "ours alone: attribute_weights = None": "the same",
        "ours alone: attribute_loss_weights = None": "the same",
        "ours alone: tie_threshold = 1.0": "of rankings",
        "ours alone: label_smoothing = 0.0": "labels may be wrong, with the name of DPOConfig",
        "ours alone: max_eval_steps = None": "an evaluation on the first batches alone",
        "ours alone: frozen_parameters = None": "parameters that do not train, by name",
        "ours alone: learning_rate_end = None": "where linear and cosine decay end, which TRL has under other names",
        "ours alone: truncation_mode = None": "cuts long pairs, with the names of DPOConfig; TRL drops them",
        "ours alone: eval_by = None": "the accuracy of each label of a column, such as the source of a pair",
        "ours alone: output_url = None": "checkpoints on any file system of fsspec, such as a bucket",
        **{f"ours alone: {item.name} = {item.default!r}": _OLD for item in _REMOVED},
    },
    "RewardConfig's values once made": {
        "{}: TRL raises ValueError, ours has bf16=False": (
            "TRL's default asks for bf16 and so fails on a CPU without use_cpu; ours trains in float32 there"
        ),
    },
    "RewardTrainer's parameters": {
        "default of model: <class 'inspect._empty'>, ours None": "model_init can be given instead",
        "ours alone: model_init": "transformers' own, which TRL had up to 0.23: a new model for each trial",
        "ours alone: tokenizer": "the name of processing_class up to TRL 0.11",
        "ours alone: max_length": "where max_length was given up to TRL 0.13",
    },
    "RewardTrainer's methods": {
        "parameters of training_step: args, kwargs; ours model, inputs, num_items_in_batch": (
            "TRL's wrapper takes anything and hands it on; ours spells transformers' parameters"
        ),
        "ours alone: describe": "the log's first lines: devices, precision, sharding",
        "ours alone: use_reward_data_collator": "TRL's name up to 0.23, for data in its columns of then",
        **{f"ours alone: {name}": _INTERNAL for name in ("fixed_rows", "shard_report")},
        "ours alone: is_distributed_loading_by_transformers": "transformers sets it on the instance",
        "ours alone: reads_padded_rows": "what a subclass overrides whose methods take packed rows",
        "ours alone: stopped_by": "what ended training before its end",
        "ours alone: save_description": "an evaluation after saving measures rewards: mean and std in config and card",
        "ours alone: stop_checkpoint": "the folder to resume from, when a time limit has ended training",
    },
    "top-level names": {
        **{
            f"ours alone: {name}": _OLD
            for name in ("TrainingArguments", "get_kbit_device_map", "is_xpu_available", "setup_chat_format")
        },
        "ours alone: score": "rewards of many rows by a saved model",
        "ours alone: RewardDataCollatorWithPadding": "the old API, which TRL had up to 0.23",
    },
    "parameters of the top-level functions": {},
}


def _names(theirs: typing.Iterable[str], ours: typing.Iterable[str]) -> Iterator[str]:
    theirs, ours = list(theirs), list(ours)
    yield from (f"TRL's alone: {name}" for name in theirs if name not in ours)
    yield from (f"ours alone: {name}" for name in ours if name not in theirs)


def _dataclass_fields(theirs: Any, ours: Any) -> Iterator[str]:
    reference, own = ({field.name: field for field in dataclasses.fields(each)} for each in (theirs, ours))
    for text in _names(reference, own):
        yield f"{text} = {own[text[12:]].default!r}" if text.startswith("ours alone") else text
    hints, own_hints = typing.get_type_hints(theirs), typing.get_type_hints(ours)
    for name in reference.keys() & own.keys():
        field, own_field = reference[name], own[name]
        if (field.default, field.default_factory) != (own_field.default, own_field.default_factory):
            yield f"default of {name}: {_shown(field.default)}, ours {_shown(own_field.default)}"
        if hints[name] != own_hints[name]:
            yield f"type of {name}: {hints[name]}, ours {own_hints[name]}"
        if (field.init, field.metadata.get("choices")) != (own_field.init, own_field.metadata.get("choices")):
            yield f"choices of {name}"
    order = [name for name in own if name in reference]
    if order != [name for name in reference if name in own]:
        yield f"order: {order}"


def _shown(default: Any) -> str:
    return repr(getattr(default, "value", default))


def _parameters(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Iterator[str]:
    reference, own = (inspect.signature(each).parameters for each in (theirs, ours))
    yield from _names(reference, own)
    if [name for name in own if name in reference] != list(reference):
        yield f"order: {', '.join(own)}"
    for name in reference.keys() & own.keys():
        if _shown(reference[name].default) != _shown(own[name].default):
            yield f"default of {name}: {_shown(reference[name].default)}, ours {_shown(own[name].default)}"
        if reference[name].kind != own[name].kind:
            yield f"kind of {name}: {reference[name].kind}, ours {own[name].kind}"


def config_fields() -> Iterator[str]:
    yield from _dataclass_fields(trl.RewardConfig, trl_tpu.RewardConfig)
    yield from (
        f"dict field {text}"
        for text in _names(trl.RewardConfig._VALID_DICT_FIELDS, trl_tpu.RewardConfig._VALID_DICT_FIELDS)
    )


SETTINGS: list[dict[str, Any]] = [
    {},
    {"use_cpu": True},
    {"fp16": True},
    {"bf16": False, "pad_to_multiple_of": "8"},
    {"bf16": False, "pad_to_multiple_of": "none"},
    {"bf16": False, "model_init_kwargs": '{"dtype": "bfloat16"}'},
    {"bf16": False, "gradient_checkpointing_kwargs": '{"use_reentrant": true}', "pad_token": "<pad>"},
    {"bf16": False, "max_length": None, "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 0.5},
    {"bf16": False, "logging_steps": 0},
]


def _made(config: Any, settings: dict[str, Any]) -> dict[str, Any] | ValueError:
    try:
        values = vars(config("out", **settings))
    except ValueError as error:
        return error
    return {key: str(value) for key, value in values.items() if not key.startswith(("_", "distributed_state"))}


def config_values() -> Iterator[str]:
    for settings in SETTINGS:
        theirs = _made(trl.RewardConfig, settings)
        ours = _made(trl_tpu.RewardConfig, settings | {"optim": "adamw_torch_fused"})
        if isinstance(theirs, ValueError) and isinstance(ours, ValueError):
            if str(theirs) != str(ours) and not isinstance(ours, UserError):  # which says what to do as well
                yield f"{settings}: TRL raises {theirs!r}, ours {ours!r}"
        elif isinstance(theirs, ValueError):
            assert isinstance(ours, dict)
            yield f"{settings}: TRL raises {type(theirs).__name__}, ours has bf16={ours['bf16']}"
        elif isinstance(ours, ValueError):
            yield f"{settings}: ours raises {ours!r}"
        else:
            different = {
                key: (theirs[key], ours[key]) for key in theirs.keys() & ours.keys() if theirs[key] != ours[key]
            }
            if different:
                yield f"{settings}: {different}"


def trainer_methods() -> Iterator[str]:
    reference, own = (
        [name for name in dir(each) if not name.startswith("_")] for each in (trl.RewardTrainer, trl_tpu.RewardTrainer)
    )
    yield from _names(reference, own)
    for name in (name for name in reference if name in own and callable(getattr(trl.RewardTrainer, name))):
        theirs, ours = getattr(trl.RewardTrainer, name), getattr(trl_tpu.RewardTrainer, name)
        if list(_parameters(theirs, ours)):
            shown = [", ".join(list(inspect.signature(each).parameters)[1:]) for each in (theirs, ours)]
            yield f"parameters of {name}: {shown[0]}; ours {shown[1]}"


def function_parameters() -> Iterator[str]:
    """Of the classes `RewardConfig`, `RewardTrainer` and `ModelConfig` elsewhere."""
    names = set(trl_tpu.__all__) & set(dir(trl)) - {"RewardConfig", "RewardTrainer", "ModelConfig"}
    for name in sorted(names):
        if callable(theirs := getattr(trl, name)):
            yield from (f"{name} {text}" for text in _parameters(theirs, getattr(trl_tpu, name)))


def top_level_names() -> Iterator[str]:
    names = [name for name in dir(trl) if not name.startswith("_") and not inspect.ismodule(getattr(trl, name))]
    for text in _names(names, (name for name in trl_tpu.__all__ if not name.startswith("_"))):
        if text.startswith("ours") or not text.endswith(_NOT_OF_REWARDS) or "Reward" in text:
            yield text


AREAS: dict[str, Callable[[], Iterator[str]]] = {
    "RewardConfig's fields": config_fields,
    "RewardConfig's values once made": config_values,
    "RewardTrainer's parameters": lambda: _parameters(trl.RewardTrainer.__init__, trl_tpu.RewardTrainer.__init__),
    "RewardTrainer's methods": trainer_methods,
    "top-level names": top_level_names,
    "parameters of the top-level functions": function_parameters,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("area", AREAS)
def test_differences_from_trl_are_the_intended_ones(area: str) -> None:
    found, intended = set(AREAS[area]()), INTENDED[area]
    assert found - intended.keys() == set(), "differences without a reason"
    assert intended.keys() - found == set(), "listed, but no longer different"
    assert all(intended.values())


def test_trls_own_parameters_come_first_so_that_positional_arguments_mean_the_same() -> None:
    theirs, ours = (list(inspect.signature(each).parameters) for each in (trl.RewardTrainer, trl_tpu.RewardTrainer))
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("trainer", ["ModelConfig", "RewardConfig", "RewardTrainer", "get_peft_config", "get_quantization_config"]),
        ("trainer.reward_config", ["RewardConfig"]),
        ("trainer.reward_trainer", ["RewardTrainer", "DataCollatorForPreference"]),
        ("trainer.model_config", ["ModelConfig"]),
        ("trainer.utils", ["disable_dropout_in_model", "remove_none_values"]),
        ("scripts", ["DatasetMixtureConfig", "ScriptArguments", "TrlParser", "get_dataset", "init_zero_verbose"]),
        ("scripts.utils", ["DatasetConfig", "DatasetMixtureConfig", "ScriptArguments", "TrlParser", "get_dataset"]),
        ("scripts.reward", ["main", "make_parser"]),
        ("cli", ["main"]),
        ("data_utils", ["apply_chat_template", "is_conversational", "maybe_apply_chat_template"]),
        ("chat_template_utils", ["clone_chat_template"]),
    ],
)
def test_names_are_at_trls_module_paths(module: str, names: list[str]) -> None:
    theirs = importlib.import_module(f"trl.{module}")
    ours = importlib.import_module(f"trl_tpu.{module}")
    for name in names:
        assert hasattr(theirs, name)
        assert callable(getattr(ours, name))


@pytest.mark.parametrize("module", ["trl.trainer.reward_trainer", "trl.scripts.reward"])
def test_what_trls_own_modules_import_of_it_is_at_the_same_paths(module: str) -> None:
    theirs = importlib.import_module(module)
    for node in ast.walk(ast.parse(Path(str(theirs.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.level or node.module == "trl"):
            path = importlib.util.resolve_name("." * node.level + str(node.module), theirs.__package__)
            ours = importlib.import_module(path.replace("trl", "trl_tpu", 1))
            assert [alias.name for alias in node.names if not hasattr(ours, alias.name)] == []


@pytest.mark.parametrize("path", trl_tpu._OLD_PATHS)
def test_old_module_paths_are_modules_like_any_other(path: str) -> None:
    name = f"trl_tpu.{path}"
    module, spec = importlib.import_module(name), importlib.util.find_spec(name)
    assert spec is not None and spec.name == name and module.__spec__ is spec
    assert operator.attrgetter(path)(trl_tpu) is module
    assert module.RewardTrainer is trl_tpu.RewardTrainer


def test_importing_the_package_is_light_and_every_public_name_can_be_imported() -> None:
    heavy = ["torch", "torch_xla", "transformers", "datasets", "jax", "trl"]
    code = f"import sys, trl_tpu; print([name for name in {heavy} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
    for name in trl_tpu.__all__:
        assert getattr(trl_tpu, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'DPOTrainer'"):
        _ = trl_tpu.DPOTrainer
