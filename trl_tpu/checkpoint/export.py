"""Export the model in a checkpoint to a folder that ``from_pretrained`` reads, on any host with plain torch.

transformers and peft read, convert, merge and write the weights. The host holds one copy of the model: in the output
dtype; in float32 if adapters are merged; in the stored dtype if the output is float16.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from ..compat.transformers4 import add_transformers4_names
from ..config.reward_config import is_url
from ..errors import UserError
from ..modeling import head_spec
from ..modeling.adapters import adapter_weights, empty_adapters, load_adapted_model
from ..modeling.heads import load_classifier, model_without_weights
from ..runtime.native import Runtime
from .folders import MANIFEST_FILE, STAGING_FOLDER, atomic_folder, find_faults, local_copy
from .state_dict import STATE_FOLDER, WEIGHT_PREFIX, read_weights, tensors_in

MODEL_FILES = ("model.safetensors", "model.safetensors.index.json")
#: Files that are copied unchanged. The vocabulary files are those that transformers' tokenizers read.
_COPIED_FILES = (
    *("config.json", head_spec.BASE_CONFIG, "generation_config.json", "*processor_config.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("vocab.txt", "vocab*.json", "*_vocab.json", "merges.txt", "dict.txt", "bpe.codes", "byte_maps.json"),
    *("emoji.json", "normalizer.json", "tekken.json", "word_shape.json", "word_pronunciation.json"),
    *("*.model", "*.spm", "*.tiktoken", "*.tokenizer"),
    *("README.md", "training.png", "verdict_*.png", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    merge: bool = False,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    trust_remote_code: bool = False,
) -> None:
    """Export the model in a checkpoint to a new folder that ``from_pretrained`` reads.

    A new folder appears only when all files are complete. If ``out`` is an existing empty folder, such as a mount
    point or a link, the complete files are moved into it, the configs last.

    Args:
        checkpoint: A checkpoint of this trainer or of transformers, or the folder of a saved model or of adapters. A
            URL that fsspec reads (`gs://...`) is first copied to a temporary folder.
        out: A new or empty local folder.
        merge: Whether to merge adapters into their base model.
        base: Folder or Hub id of the adapters' base model; None for the base model that their config names.
        dtype: Dtype of the exported weights; None keeps the trained dtype (merged models: the base model's dtype).
        max_shard_size: Maximum size of one file, such as "5GB".
        trust_remote_code: Whether to run code that comes with the model.

    Raises:
        UserError: The checkpoint is damaged, has no safetensors weights, or lacks some; `out` has files; `merge` or
            `base` is set, but the checkpoint has no adapters; a weight is too large for `dtype`.
    """
    if is_url(str(out)):
        raise UserError(f"{out} is a URL. Pass a new local folder, and upload it afterwards.")
    out = Path(os.path.realpath(out))
    if os.path.lexists(out) and not (out.is_dir() and set(out.iterdir()) <= {out / STAGING_FOLDER}):
        raise UserError(f"{out} exists and is not overwritten. Pass a new folder, or delete this one first.")
    with local_copy(checkpoint) as folder:
        config_file = folder / ADAPTER_CONFIG_NAME
        has_adapters = config_file.is_file()
        if not has_adapters and (merge or base is not None):
            raise UserError(f"{checkpoint} has no {config_file.name}: `--merge` and `--base` apply only to adapters.")
        if (folder / MANIFEST_FILE).exists() and (faults := find_faults(folder)):
            raise UserError(f"The checkpoint {checkpoint} is damaged: {'; '.join(faults)}. Export another one.")
        base_name = (base or _read_config(config_file).get("base_model_name_or_path", "")) if has_adapters else ""
        # only adapters need their base model's config
        names = _files_to_copy(folder) - ({head_spec.BASE_CONFIG} if merge else set())
        with atomic_folder(out) as staging:
            for name in names:
                (staging / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(folder / name, staging / name)
            if merge:
                _name_base_in_card(staging / "README.md", base_name)
            if has_adapters and not merge:
                _write_adapters(folder, staging, base_name, dtype, trust_remote_code)
            else:
                settings = folder, dtype, trust_remote_code
                model = _merged_model(staging, base_name, *settings) if merge else _full_model(*settings)
                head_spec.set_inference_metadata(model.config)  # servers read fields that other trainers' configs lack
                model.save_pretrained(staging, max_shard_size=max_shard_size)
            add_transformers4_names(staging)


# ---- files


def _files_to_copy(folder: Path) -> set[str]:
    """Return the names of files to copy: configs, tokenizer, templates, model card, custom code."""
    paths = (path for pattern in _COPIED_FILES for path in folder.glob(pattern) if path.is_file())
    names = {path.relative_to(folder).as_posix() for path in paths}
    maps = [_read_config(folder / name).get("auto_map") for name in names if name.endswith("config.json")]
    # entries are "module.Class", or two of them for a tokenizer, or "owner/name--module.Class" of another repository
    modules = re.findall(r'"(\w+)\.\w+"', json.dumps(maps))
    while modules:
        module = modules.pop()
        # loading the model reports missing modules
        if module.isidentifier() and (folder / f"{module}.py").is_file() and f"{module}.py" not in names:
            names.add(f"{module}.py")
            modules += get_relative_imports(folder / f"{module}.py")
    return names


def _name_base_in_card(path: Path, base: str) -> None:
    """Name the base model of merged adapters in the model card, and in its metadata if it may be on the Hub."""
    card = ModelCard(path.read_text(encoding="utf-8") if path.is_file() else "---\n{}\n---\n# Reward model\n")
    if head_spec.may_be_on_the_hub(base):
        card.data["base_model"] = base
    sentence = f"The trained adapters are merged into the weights of `{base}`."
    card.text = f"{card.text.rstrip()}\n\n## Base model\n\n{sentence}\n"
    card.save(path)


def _read_config(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


# ---- weights


def _full_model(checkpoint: Path, dtype: torch.dtype | None, trust_remote_code: bool) -> PreTrainedModel:
    """Return the trained model in ``dtype``, by default in the stored dtype."""
    has_model_files = any((checkpoint / file).is_file() for file in MODEL_FILES)
    stored = _stored_dtype(checkpoint) if has_model_files else _stored_dtype(checkpoint / STATE_FOLDER, WEIGHT_PREFIX)
    spec = head_spec.HeadSpec.saved(checkpoint)
    load_dtype = stored if dtype == torch.float16 else dtype or stored  # loading in float16 would hide overflows
    if has_model_files:
        model, info = load_classifier(str(checkpoint), spec, dtype=load_dtype, trust_remote_code=trust_remote_code)
        if missing := sorted(info["missing_keys"])[:5]:
            raise UserError(f"{checkpoint} lacks weights: {', '.join(missing)}. Copy it again.")
    else:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        model = model_without_weights(config, load_dtype, trust_remote_code).to_empty(device="cpu")
        model.tie_weights()
        read_weights(model, checkpoint, Runtime())
    head_spec.fold_attributes(model, spec)
    return _to_dtype(model, dtype or stored)


def _merged_model(
    copies: Path, base: str, checkpoint: Path, dtype: torch.dtype | None, trust_remote_code: bool
) -> PreTrainedModel:
    """Merge the trained adapters into the base model in float32, round once to ``dtype``, and return the model.

    ``copies`` has the checkpoint's tokenizer, which may have more tokens than the base model.
    """
    spec = head_spec.HeadSpec.saved(checkpoint)
    kwargs: Any = {"num_labels": len(spec.weights), "trust_remote_code": trust_remote_code}
    with tempfile.TemporaryDirectory() as adapters:  # peft loads adapters only from a folder
        shutil.copytree(copies, adapters, dirs_exist_ok=True)
        _write_adapters(checkpoint, Path(adapters), base, None, trust_remote_code)
        merged = load_adapted_model(adapters, spec, dtype=torch.float32, **kwargs).merge_and_unload()
    head_spec.fold_attributes(merged, spec)
    head_spec.set_reward_normalization(merged.config, head_spec.saved_scale(checkpoint))
    stored = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code).dtype
    return _to_dtype(merged, dtype or stored or torch.float32)


def _write_adapters(
    checkpoint: Path, folder: Path, base: str, dtype: torch.dtype | None, trust_remote_code: bool
) -> None:
    """Write the trained adapters in peft's format to ``folder``."""
    if (checkpoint / ADAPTER_SAFE_WEIGHTS_NAME).is_file():
        weights = load_file(checkpoint / ADAPTER_SAFE_WEIGHTS_NAME)
    else:
        stored = _stored_dtype(checkpoint / STATE_FOLDER, WEIGHT_PREFIX)
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        head_spec.write_head_spec(config, head_spec.HeadSpec.saved(checkpoint))
        model = model_without_weights(config, stored, trust_remote_code)
        adapted = empty_adapters(model, str(checkpoint), stored)
        read_weights(adapted, checkpoint, Runtime())
        weights = adapter_weights(adapted)
    _check_range(weights.items(), dtype)
    weights = {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / ADAPTER_SAFE_WEIGHTS_NAME, {"format": "pt"})
    named = {"base_model_name_or_path": base} if base else {}
    config = _read_config(checkpoint / ADAPTER_CONFIG_NAME) | {"inference_mode": True} | named
    (folder / ADAPTER_CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _stored_dtype(folder: Path, prefix: str = "") -> torch.dtype:
    """Return the widest dtype of the safetensors weights in ``folder`` with names that begin with ``prefix``.

    Raises:
        UserError: ``folder`` has no weights; see also `tensors_in`.
    """
    dtypes = [tensor.dtype for tensor in tensors_in(folder, prefix).values() if tensor.is_floating_point()]
    if not dtypes:
        raise UserError(
            f"{folder} has no weights in safetensors. Pickled weights are not read because they could run code. Pass "
            "the folder of a checkpoint (`output_dir/checkpoint-N`) or of a saved model."
        )
    return reduce(torch.promote_types, dtypes)


def _to_dtype(model: Any, dtype: torch.dtype) -> PreTrainedModel:
    _check_range(model.named_parameters(), dtype)
    return model.to(dtype)


def _check_range(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> None:
    """Reject finite weights that would become infinite in float16. Other dtypes need no check: their range is larger.

    Raises:
        UserError: A weight is too large for float16. The message names the first one.
    """
    for name, tensor in weights if dtype == torch.float16 else ():
        if tensor.isfinite().all() and not tensor.to(dtype).isfinite().all():
            raise UserError(
                f"{name} has values that would become infinite in float16. Use `--dtype bfloat16`: it has the range "
                "of float32."
            )
