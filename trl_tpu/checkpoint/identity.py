"""Identity of a run: everything that decides its numbers, as names and values that a checkpoint records."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import nn
from transformers.utils import ADAPTER_CONFIG_NAME

from ..config.reward_config import RewardConfig
from ..modeling.adapters import adapter_names
from ..modeling.head_spec import is_peft_model, without_adapters
from ..parallel.shard import full_tensor

#: Fields of a model's config that say nothing about its outputs, or that training writes (`mean` and `std`).
_CONFIG_FIELDS_OF_NO_RUN = {
    *("architectures", "auto_map", "distributed_config", "dtype", "labels_as", "mean", "std"),
    *("transformers_version", "use_cache"),
}
#: Fields of a peft config that say nothing about the adapters' outputs.
_ADAPTER_FIELDS_OF_NO_RUN = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("init_lora_weights", "init_weights"),
}
#: Fields of a peft config that do not change the meaning of saved weights, or that show in their names.
_HARMLESS_ADAPTER_FIELDS = re.compile(r".*(dropout|_modules|modules_to_save|layers_to_transform|layers_pattern)")
#: Settings of an optimizer's groups that follow the schedule, or choose a kernel.
_GROUP_SETTINGS_OF_NO_RUN = {"params", "lr", "initial_lr", "capturable", "foreach", "fused"}
#: Two values that mean the same: no arguments; an optimizer by two kernels.
_EQUAL: Any = ([None, {}], ["adamw_torch", "adamw_torch_fused"])
LAYOUT = "the layout of batches (`packing`)"
_ADAPTERS, _BASE = "adapters ", "checksum of the base model's weights"


class Change(NamedTuple):
    """A difference between a checkpoint's run and the current one.

    Args:
        name: Name of the setting or part.
        before: Its value in the checkpoint's run.
        after: Its current value.
    """

    name: str
    before: Any
    after: Any

    @property
    def breaks(self) -> bool:
        """Whether no run may go on: the weights would mean something else, or the layout of batches differs.

        The meaning of weights depends on the attributes of the outputs, on adapters' kind, rank and scale, and on
        their base model.
        """
        is_adapters = self.name.startswith(_ADAPTERS) and not _HARMLESS_ADAPTER_FIELDS.fullmatch(self.name)
        return is_adapters or self.name in ("attributes", LAYOUT) or self.name.startswith(_BASE)

    def __str__(self) -> str:
        return f"{self.name} was {self.before!s:.200} and is {self.after!s:.200}"


def identity_of(args: RewardConfig, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return all settings that change the run, and what describes its model, adapters and tokenizer, for JSON.

    Args:
        args: The trainer's settings.
        model: The model, with or without adapters; None if a hyperparameter search makes it later.
        tokenizer: The tokenizer, or None.
    """
    described = args.identifying_settings()
    if isinstance(kwargs := described["model_init_kwargs"], dict):
        kept = kwargs.keys() - {"cache_dir", "dtype", "force_download", "local_files_only", "torch_dtype"}
        described["model_init_kwargs"] = {name: kwargs[name] for name in kept} or None
    if isinstance(model, nn.Module):
        config: Any = getattr(without_adapters(model), "config", None)
        fields = config.to_dict() if hasattr(config, "to_dict") else {}
        described |= {f"config.{name}": value for name, value in _deciding_fields(fields).items()}
        described["dtype of the weights"] = _dtypes(model)
    described["the adapters"] = ", ".join(sorted(getattr(model, "peft_config", {}))) or "none"
    if is_peft_model(model):
        described |= _adapters_of({name: config.to_dict() for name, config in model.peft_config.items()})
    if tokenizer is not None:
        kinds = tokenizer.SPECIAL_TOKENS_ATTRIBUTES
        described |= {f"tokenizer.{kind}": tokenizer.special_tokens_map.get(kind) for kind in kinds}
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
        for name, text in (("vocabulary", vocabulary), ("chat_template", json.dumps(tokenizer.chat_template))):
            described[f"tokenizer.{name}"] = f"checksum {crc32(text.encode()):08x}"
    return json.loads(json.dumps(described, default=_plain))


def optimizer_identity(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of an optimizer's parameter groups. A script may set them without `args`."""
    names = sorted({name for group in groups for name in group} - _GROUP_SETTINGS_OF_NO_RUN)
    # sorted different values, since transformers splits groups by the mesh of their parameters
    values = {name: sorted({json.dumps(group.get(name), default=_plain) for group in groups}) for name in names}
    return {f"optimizer.{name}": " or ".join(values[name]) for name in names}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the differences between two results of `identity_of`, for names that both have."""
    both = [Change(name, before[name], now[name]) for name in now if name in before]
    different = [each for each in both if each.before != each.after]
    return [each for each in different if not any(each.before in same and each.after in same for same in _EQUAL)]


def saved_adapters(checkpoint: str | Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``identity`` that describes adapters, as a checkpoint of any trainer has it."""
    names = {name.removeprefix(_ADAPTERS).partition(".")[0] for name in identity if name.startswith(_ADAPTERS)}
    files = {name: Path(checkpoint, "" if name == "default" else name, ADAPTER_CONFIG_NAME) for name in names}
    saved = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()}
    return _adapters_of(saved)


def base_identity(model: Any) -> dict[str, Any]:
    """Return the part of a run's identity that describes weights under adapters: a checkpoint does not hold them.

    It is the sum of their bits as integers, which does not depend on devices, sharding or stacked layers. It is read
    from the device. On a mesh of processes all must call this function. Weights are gathered one by one.
    """
    if not is_peft_model(model):
        return {}
    weights = model.state_dict(keep_vars=True)
    saved, sums = adapter_names(model, weights), list[torch.Tensor]()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    names = [name for name in weights if name not in saved and ".original_module." not in name]
    for weight in (full_tensor(weights[name].detach()) for name in names):
        bits = (weight if weight.dim() else weight[None]).view(integers[weight.element_size()])
        # int32 sums of rows wrap around, the same on every device, and need no copy of a float32 weight in int64
        sums.append(bits.sum(-1, dtype=torch.int32).sum(dtype=torch.int64))
    return {f"{_BASE} in {_dtypes(model)}": int(torch.stack(sums).sum()) if sums else 0}


def _dtypes(model: nn.Module) -> str:
    return ", ".join(sorted({str(weight.dtype) for weight in model.parameters()}))


def _deciding_fields(config: Any) -> Any:
    """Return the fields of a model's config that decide its outputs, also in the configs of its parts."""
    if not isinstance(config, Mapping):
        return config
    names = [name for name in config if not str(name).startswith("_") and name not in _CONFIG_FIELDS_OF_NO_RUN]
    return {name: _deciding_fields(config[name]) for name in names}


def _adapters_of(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{_ADAPTERS}{adapter}.{name}": sorted(value, key=str) if isinstance(value, list | set) else value
        for adapter, config in configs.items()
        for name, value in config.items()
        if name not in _ADAPTER_FIELDS_OF_NO_RUN
    }


def _plain(value: Any) -> Any:
    """Return a value for JSON that is the same in every process: no addresses, sets in order."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
