"""The API equals that of the installed trl, except for the differences listed here or in a guide, with their reasons.

Each area lists its differences as texts. A new difference, for example from a later trl, fails until it is listed. A
listed difference that no longer exists fails, too.
"""

import ast
import dataclasses
import fnmatch
import importlib
import importlib.util
import inspect
import itertools
import os
import pickle
import pkgutil
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import trl
import trl.scripts.utils
from environment import EXAMPLES, ROOT

import trl_tpu
from trl_tpu import data_utils
from trl_tpu.compat.arguments import REMOVED
from trl_tpu.scripts import utils
from trl_tpu.trainer.model_config import ModelConfig

GUIDE = (EXAMPLES / "guides" / "differences_from_trl.md").read_text(encoding="utf-8")
FIELDS_IN_GUIDE = re.findall(r"`(\w+)`", re.findall(r"- `RewardConfig` has (.+?)\.\n- ", GUIDE, re.DOTALL)[0])
_OLD = "scripts for older versions of TRL give it, or import it"
_DATASETS = "type of datasets: list[trl.scripts.utils.DatasetConfig], ours list[trl_tpu.scripts.utils.DatasetConfig]"

# area -> difference -> reason
DIFFERENCES: dict[str, dict[str, str]] = {
    "RewardConfig's fields": {
        "default of per_device_train_batch_size: 8, ours None": "None until total_batch_size is known",
    },
    "fields of other configs": {
        "ModelConfig's default of lora_task_type: 'CAUSAL_LM', ours 'SEQ_CLS'": "peft rejects TRL's for classifiers",
        "ModelConfig's ours alone: torch_dtype": "the name of `dtype` up to TRL 0.23",
        f"DatasetMixtureConfig's {_DATASETS}": "each package has its own class",
    },
    "RewardTrainer's parameters": {"default of model: <class 'inspect._empty'>, ours None": "model_init instead"},
    "RewardTrainer's methods": {
        "parameters of training_step: (self, *args, **kwargs), "
        "ours (self, model, inputs, num_items_in_batch=None)": "as in transformers"
    },
    "parameters of the functions": {"get_dataset_column_names ours alone: name": "the dataset's name in errors"},
}
# area -> reason -> names that only this package has
ADDED: dict[str, dict[str, str]] = {
    "RewardConfig's fields": {"groups of the guide": " ".join(FIELDS_IN_GUIDE), _OLD: " ".join(REMOVED)},
    "RewardTrainer's parameters": {"parameters of TRL or transformers in the past": "model_init tokenizer max_length"},
    "RewardTrainer's methods": {
        "description of the run and of its end": "describe stopped_by stop_checkpoint save_description",
        "TRL's name up to 0.23, for data in old columns": "use_reward_data_collator",
        "hooks and reports of this package": "fixed_shapes shard_report",
        "transformers sets it on the instance": "is_distributed_loading_by_transformers",
        "hook of subclasses that read packed rows": "reads_padded_rows",
    },
    "top-level names": {
        _OLD: "RewardDataCollatorWithPadding TrainingArguments get_kbit_device_map is_xpu_available setup_chat_format",
        "rewards of many rows by a saved model": "score",
        "for custom training loops": "TrainState evaluation_step training_step",
    },
}
OTHER_CONFIGS: list[tuple[Any, Any]] = [
    (trl.ModelConfig, ModelConfig),
    (trl.ScriptArguments, utils.ScriptArguments),
    (trl.DatasetMixtureConfig, utils.DatasetMixtureConfig),
    (trl.scripts.utils.DatasetConfig, utils.DatasetConfig),
]


def _names(theirs: typing.Iterable[str], ours: typing.Iterable[str]) -> Iterator[str]:
    theirs, ours = list(theirs), list(ours)
    yield from (f"TRL's alone: {name}" for name in theirs if name not in ours)
    yield from (f"ours alone: {name}" for name in ours if name not in theirs)


def _differences(theirs: dict[str, dict[str, str]], ours: dict[str, dict[str, str]]) -> Iterator[str]:
    """Return texts for missing, added and changed entries, and for a different order."""
    yield from _names(theirs, ours)
    order = [name for name in ours if name in theirs]
    if order != [name for name in theirs if name in ours]:
        yield f"order: {', '.join(order)}"
    for name in order:
        for what, value in theirs[name].items():
            if value != ours[name][what]:
                yield f"{what} of {name}: {value}, ours {ours[name][what]}"


def _format_default(default: Any) -> str:
    return repr(getattr(default, "value", default))


def _dataclass_fields(theirs: Any, ours: Any) -> Iterator[str]:
    def fields(config: Any) -> dict[str, dict[str, str]]:
        types = typing.get_type_hints(config)
        return {
            each.name: {
                "default": _format_default(each.default),
                "factory": repr(each.default_factory),
                "type": str(types[each.name]),
                "choices": str((each.init, each.metadata.get("choices"))),
            }
            for each in dataclasses.fields(config)
        }

    return _differences(fields(theirs), fields(ours))


def _parameters(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Iterator[str]:
    def parameters(function: Callable[..., Any]) -> dict[str, dict[str, str]]:
        found = inspect.signature(function).parameters
        return {name: {"default": _format_default(one.default), "kind": str(one.kind)} for name, one in found.items()}

    return _differences(parameters(theirs), parameters(ours))


def config_fields() -> Iterator[str]:
    yield from _dataclass_fields(trl.RewardConfig, trl_tpu.RewardConfig)
    theirs, ours = (package.RewardConfig._VALID_DICT_FIELDS for package in (trl, trl_tpu))
    yield from (f"dict field {text}" for text in _names(theirs, ours))


def other_config_fields() -> Iterator[str]:
    for theirs, ours in OTHER_CONFIGS:
        yield from (f"{ours.__name__}'s {text}" for text in _dataclass_fields(theirs, ours))


def trainer_methods() -> Iterator[str]:
    def methods(trainer: type) -> dict[str, dict[str, str]]:
        own = {name: getattr(trainer, name) for name in dir(trainer) if not name.startswith("_")}
        return {name: {"parameters": _without_annotations(one)} if callable(one) else {} for name, one in own.items()}

    return _differences(methods(trl.RewardTrainer), methods(trl_tpu.RewardTrainer))


def _without_annotations(function: Callable[..., Any]) -> str:
    """Return the signature without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([each.replace(annotation=each.empty) for each in parameters]))


def function_parameters() -> Iterator[str]:
    """Return signatures of public functions and classes except `RewardConfig`, `RewardTrainer` and `ModelConfig`."""
    for theirs, ours in ((trl, trl_tpu), (trl.data_utils, data_utils)):
        for name in set(dir(ours)) & set(dir(theirs)) - {"RewardConfig", "RewardTrainer", "ModelConfig"}:
            function = getattr(theirs, name)
            if callable(function) and function.__module__.startswith("trl.") and not name.startswith("_"):
                yield from (f"{name} {text}" for text in _parameters(function, getattr(ours, name)))


def top_level_names() -> Iterator[str]:
    names = [name for name in trl_tpu.__all__ if not name.startswith("_") and not hasattr(trl, name)]
    yield from (f"ours alone: {name}" for name in names)


AREAS: dict[str, Callable[[], Iterator[str]]] = {
    "RewardConfig's fields": config_fields,
    "fields of other configs": other_config_fields,
    "RewardTrainer's parameters": lambda: _parameters(trl.RewardTrainer.__init__, trl_tpu.RewardTrainer.__init__),
    "RewardTrainer's methods": trainer_methods,
    "top-level names": top_level_names,
    "parameters of the functions": function_parameters,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("area", AREAS)
def test_differences_from_trl_equal_the_listed_ones(area: str) -> None:
    own = ADDED.get(area, {}).items()
    listed = DIFFERENCES.get(area, {}) | {f"ours alone: {name}": why for why, names in own for name in names.split()}
    found = set(AREAS[area]())
    assert found - listed.keys() == set(), "differences without a reason"
    assert listed.keys() - found == set(), "listed, but no longer different"
    assert all(listed.values())


def test_positional_arguments_have_trls_order() -> None:
    theirs, ours = (list(inspect.signature(each).parameters) for each in (trl.RewardTrainer, trl_tpu.RewardTrainer))
    assert ours[: len(theirs)] == theirs
    *fields, old = (field.name for field in dataclasses.fields(ModelConfig))
    assert fields == [field.name for field in dataclasses.fields(trl.ModelConfig)] and old == "torch_dtype"


def test_torch_dtype_is_accepted_and_readable() -> None:
    assert ModelConfig(dtype="bfloat16").torch_dtype == "bfloat16"
    assert ModelConfig(torch_dtype="bfloat16").dtype == "bfloat16"
    assert ModelConfig().trust_remote_code is False


def test_imports_of_trls_script_exist_at_the_same_paths() -> None:
    """`test_customized.py` executes the source of TRL's trainer."""
    own = importlib.import_module("trl.scripts.reward")
    for node in ast.walk(ast.parse(inspect.getsource(own))):
        if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).split(".")[0] == "trl"):
            path = importlib.util.resolve_name("." * node.level + str(node.module), own.__package__)
            ours = importlib.import_module(path.replace("trl", "trl_tpu", 1))
            assert [alias.name for alias in node.names if not hasattr(ours, alias.name)] == []


def public_names(module: ModuleType) -> set[str]:
    """Return the names in a module's ``__all__``, or the names it defines."""
    names = getattr(module, "__all__", None) or getattr(module, "_import_structure", None)
    if names is not None:
        names = itertools.chain(*names.values()) if isinstance(names, dict) else names
        return {name for name in names if not inspect.ismodule(getattr(module, name))}
    assigned = [node.targets[0] for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.Assign)]
    names = {node.id for node in assigned if isinstance(node, ast.Name)} - {"logger"}
    return names | {name for name, one in vars(module).items() if getattr(one, "__module__", None) == module.__name__}


@pytest.mark.filterwarnings("ignore")
def test_every_public_trl_name_exists_or_is_listed_in_the_guide() -> None:
    rows = GUIDE.partition("### Names")[2].partition("\n## ")[0]
    listed = re.findall(r"`([\w.*]+)`", "".join(re.findall(r"^\| (`.*?) \| ", rows, re.MULTILINE)))
    used = set()

    def is_listed(name: str) -> bool:
        used.update(found := [pattern for pattern in listed if fnmatch.fnmatchcase(name, pattern)])
        return bool(found)

    absent = []
    paths = ["trl", *(each.name for each in pkgutil.walk_packages(trl.__path__, "trl.", onerror=print))]
    for path in [*paths, "trl.trainer.training_configs"]:
        try:
            own = importlib.import_module(path.replace("trl", "trl_tpu", 1))
        except ModuleNotFoundError:
            absent += [] if is_listed(path) else [path]
            continue
        names = public_names(importlib.import_module(path)) if path in paths else {"RewardConfig"}
        absent += [f"{path}.{name}" for name in names if not (name[0] == "_" or hasattr(own, name) or is_listed(name))]
    assert absent == []
    assert set(listed) - used == set(), "listed, but not missing"


def test_trl_module_paths_resolve_before_any_import() -> None:
    code = f"""
import importlib.util, operator
for name in {[f"trl_tpu.{path}" for path in trl_tpu._OLD_PATHS]}:
    spec, module = importlib.util.find_spec(name), importlib.import_module(name)
    assert spec is not None and spec.name == name == module.__spec__.name, name
    import trl_tpu
    assert operator.attrgetter(name.partition(".")[2])(trl_tpu) is module, name
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    old, models = map(importlib.import_module, ("trl_tpu.trainer.training_configs", "trl_tpu.models"))
    assert old.RewardConfig is models.RewardConfig is trl_tpu.RewardConfig


@pytest.mark.parametrize(("module", "name"), [("prm_config", "PRMConfig"), ("prm_trainer", "PRMTrainer")])
def test_process_reward_classes_keep_the_paths_in_old_pickles(module: str, name: str) -> None:
    pickled = f"ctrl_tpu.experimental.prm.{module}\n{name}\n.".encode()
    assert pickle.loads(pickled) is getattr(importlib.import_module("trl_tpu.experimental.prm"), name)


def test_every_public_name_can_be_imported() -> None:
    for name in trl_tpu.__all__:
        assert getattr(trl_tpu, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'DPOTrainer'"):
        _ = trl_tpu.DPOTrainer
