"""Couplings that other libraries could break without an error: overrides, attributes we set, names we look up.

An upgrade that renames one of these or stops calling an override must fail here and not in a run. Imports and calls
need no test, because they raise. The upper bounds in setup.cfg are the versions this file was last reviewed with;
review it again before raising one.
"""

import ast
import importlib.util
import inspect
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import overridden
import pytest
from environment import ROOT
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from transformers import Trainer

import trl_tpu
from trl_tpu import RewardTrainer
from trl_tpu.experimental.prm import PRMTrainer

# ---- transformers.Trainer: overrides

OVERRIDES = sorted(
    {
        name
        for kind in PRMTrainer.__mro__
        if kind.__module__.startswith("trl_tpu")
        for name, value in vars(kind).items()
        if hasattr(Trainer, name) and inspect.isfunction(value) and not name.startswith("__")
    }
)


def parameters_of(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_few_methods_are_overridden() -> None:
    assert len(OVERRIDES) <= 20
    assert len([name for name in OVERRIDES if name.startswith("_")]) <= 9


@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides_accept_transformers_arguments(name: str) -> None:
    ours = parameters_of(getattr(RewardTrainer, name))
    hands_on = {"args", "kwargs"} & set(ours)
    assert hands_on or name == "create_model_card" or ours == parameters_of(getattr(Trainer, name))


def test_overrides_are_called(tmp_path: Path) -> None:
    """The run evaluates, saves, resumes and predicts. `test_old_api.py` trains with a `model_init`."""
    called = overridden.run(trl_tpu, tmp_path)["called"]
    assert set(OVERRIDES) - set().union(*called.values()) == {"call_model_init"}


# ---- transformers.Trainer: attributes that are read and set

ATTRIBUTES = [
    *("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_signature_columns"),
    *("_train_batch_size", "loss_is_scaled_for_ga", "is_in_train"),
    "is_distributed_loading_by_transformers",
]
# method of transformers' Trainer -> source lines that it has to contain, in this order
SOURCES = {
    "__init__": ["self.init_hf_repo()"],  # creates the Hub repository with the trainer
    "_finalize_training": ["self.args.save_total_limit == 1"],  # `DeviceTrainer` sets another limit after a stop
    "train": ["self._load_from_checkpoint(", "self._inner_training_loop"],  # weights first, then the optimizer's state
    "_get_dataloader": ["data_collator = self.data_collator"],  # `data/loader.py` replaces it during the call
}


def test_attributes_read_or_set_by_us_exist() -> None:
    source = inspect.getsource(inspect.getmodule(Trainer))  # type: ignore[arg-type]
    assert [name for name in ATTRIBUTES if f"self.{name}" not in source] == []


@pytest.mark.parametrize("method", SOURCES)
def test_trainer_methods_contain_the_code_we_rely_on(method: str) -> None:
    source = inspect.getsource(getattr(Trainer, method))
    places = [source.index(part) for part in SOURCES[method]]
    assert places == sorted(places)


# ---- names in modules: read from their source, without an import

NAMES = {
    "transformers.modeling_layers": ["_gradient_checkpointing_func"],
    "transformers.distributed.mixin": ["model._device_mesh = "],
    "transformers.distributed.sharding_utils": ["not placement.is_shard()"],
    "transformers.training_args": ["ACCELERATE_USE_CPU"],
    "transformers.hf_argparser": ["_parse_dataclass_field"],
    "accelerate.state": ["ACCELERATE_TORCH_DEVICE", "DistributedType.MULTI_CPU", "is_initialized():"],
    "torch.optim.adam": ['getattr(self, "found_inf", None)'],
    "torch_tpu._internal.device._device_module": ["def _get_cache_misses("],
}


@pytest.mark.parametrize("module", NAMES)
def test_imported_names_are_in_their_modules(module: str) -> None:
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        pytest.skip(f"{top} is not installed")
    source = Path(spec.origin).parent.joinpath(*rest).with_suffix(".py").read_text(encoding="utf-8")
    assert [name for name in NAMES[module] if name not in source] == []


# ---- versions


# next version that requires a review of this file; the next major version if only public names are used
NEXT = {"torch": "2.16", "torch_xla": "2.10", "transformers": "5.25", "accelerate": "2", "datasets": "6", "peft": "1"}


@pytest.mark.parametrize("name", NEXT)
def test_coupled_libraries_have_an_upper_bound(name: str) -> None:
    found = re.search(rf"^ +{name}([<=>].+)", (ROOT / "setup.cfg").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    if name != "torch_xla" or importlib.util.find_spec(name) is not None:
        assert Version(version(name)) in SpecifierSet(found[1])
    assert Version(NEXT[name]) not in SpecifierSet(found[1])


# ---- variables of other libraries that are replaced for the whole process, and why there is no other way

PATCHES = {
    "device_choice.py: transformers.USE_TORCH_XLA": "read once, at import; no argument disables XLA",
    "device_choice.py: accelerate._torch_xla_available": "the same",
    "placeholder.py: xr.global_runtime_device_count": "in a subprocess without a device",
    "placeholder.py: kernels.get_ir_version": "in that subprocess: jax asks a TPU for it",
}
LIBRARIES = {"torch", "torch_xla", "transformers", "accelerate", "peft", "datasets", "xm", "xs", "xr", "kernels"}


def test_no_unlisted_library_variable_is_replaced() -> None:
    found = {
        f"{path.name}: {ast.unparse(target)}"
        for path in (ROOT / "trl_tpu").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target).partition(".")[0] in LIBRARIES
    }
    assert found == PATCHES.keys()
