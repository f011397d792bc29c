"""Write the model in a checkpoint to a folder that ``from_pretrained`` reads, in plain torch.

transformers and peft read, convert, merge and write. The host holds the model once: in the dtype that is written; in
float32 if adapters are merged, and as it is stored if float16 is written.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_imports

from ..config.reward_config import is_url
from ..errors import UserError
from ..modeling.adapters import adapter_weights, empty_adapters, merge_adapters
from ..modeling.head_spec import (
    BASE_CONFIG,
    HeadSpec,
    fold_attributes,
    saved_scale,
    set_inference_metadata,
    set_reward_normalization,
    write_head_spec,
    write_old_names,
)
from ..modeling.load import load_classifier, load_tokenizer
from ..modeling.model_shape import model_without_weights
from ..runtime.native import Runtime
from .folders import MANIFEST_FILE, STAGING_FOLDER, atomic_folder, find_faults, local_copy
from .state_dict import STATE_FOLDER, WEIGHT_PREFIX, read_weights, reader_of

MODEL_FILES = ("model.safetensors", "model.safetensors.index.json")
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_READ = ("*.safetensors*", ADAPTER_CONFIG, f"{STATE_FOLDER}/*.safetensors")
#: the vocabularies are those of transformers' tokenizers
_COMPANIONS = (
    *("config.json", BASE_CONFIG, "generation_config.json", "*processor_config.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("vocab.txt", "vocab*.json", "*_vocab.json", "merges.txt", "dict.txt", "bpe.codes", "byte_maps.json"),
    *("emoji.json", "normalizer.json", "tekken.json", "word_shape.json", "word_pronunciation.json"),
    *("*.model", "*.spm", "*.tiktoken", "*.tokenizer"),
    *("README.md", "LICENSE*", "NOTICE*", "USE_POLICY*"),
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
    """Write the model in a checkpoint to a new folder, as ``from_pretrained`` reads it.

    The folder appears when it is complete. An empty one may be there already, and be a mount point or a link: its
    files appear when all are complete, what loading begins with last.

    Args:
        checkpoint: A checkpoint of this trainer or of transformers', or the folder of a saved model or of adapters; at
            a URL of fsspec's (`gs://...`) it is copied to below TMPDIR first.
        out: The new folder, or an empty one.
        merge: Whether to merge adapters into their base model.
        base: Folder or Hub id of that base model; None for the one that the adapters name.
        dtype: Of the weights; None leaves them as they were trained (merged ones: as the base model is stored).
        max_shard_size: Of one file, such as "5GB".
        trust_remote_code: Whether the model may bring its own code.

    Raises:
        UserError: The checkpoint is damaged, has no weights in safetensors, or lacks some; `out` has files; `merge` or
            `base` do not fit what the checkpoint is; `dtype` cannot hold a weight.
    """
    if is_url(str(out)):
        raise UserError(f"{out} is a URL. Give a new folder of this machine, and copy it there from here.")
    out = Path(os.path.realpath(out))
    if os.path.lexists(out) and not (out.is_dir() and set(out.iterdir()) <= {out / STAGING_FOLDER}):
        raise UserError(f"{out} exists, and nothing is written over. Give a new folder, or delete it first.")
    with local_copy(checkpoint) as folder:
        has_adapters = (folder / ADAPTER_CONFIG).is_file()
        _check(folder, merge, base, has_adapters)
        companions = _companions(folder)
        with atomic_folder(out) as staging:
            for name in companions:
                if not (merge and name == BASE_CONFIG):
                    (staging / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(folder / name, staging / name)
            if has_adapters and not merge:
                _write_adapters(folder, staging, base, dtype, trust_remote_code)
            else:
                if has_adapters:
                    model = _merged_model(folder, base, dtype, trust_remote_code)
                else:
                    model = _whole_model(folder, dtype, trust_remote_code)
                set_inference_metadata(model.config)  # another trainer's model may lack what they read
                model.save_pretrained(staging, max_shard_size=max_shard_size)
            write_old_names(staging)


# ---- files


def _check(checkpoint: Path, merge: bool, base: str | None, has_adapters: bool) -> None:
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} is no folder. Give the folder of a checkpoint or of a saved model.")
    read = (path for pattern in _READ for path in checkpoint.glob(pattern))
    _check_regular(checkpoint, (path.relative_to(checkpoint).as_posix() for path in read))
    if not has_adapters and (merge or base is not None):
        raise UserError(f"{checkpoint} has no {ADAPTER_CONFIG}: `--merge` and `--base` are for adapters.")
    if (checkpoint / MANIFEST_FILE).exists() and (faults := find_faults(checkpoint)):
        raise UserError(f"The checkpoint {checkpoint} is damaged: {'; '.join(faults)}. Export another one.")


def _check_regular(folder: Path, names: Iterable[str]) -> None:
    """Reject links among ``names``: their targets are not part of the folder."""
    root = os.path.realpath(folder)
    for name in names:
        path = folder / name
        if os.path.realpath(path) != os.path.join(root, name) or not path.is_file():
            raise UserError(
                f"{path} is a link or no regular file, and neither is exported. If it is meant to be part of the "
                f"model, put a copy in its place: cp -rL {folder} NEW_FOLDER"
            )


def _companions(folder: Path) -> set[str]:
    """Return the files that go with a model's weights: configs, tokenizer, templates, card, its own code."""
    paths = [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]
    names = {path.relative_to(folder).as_posix() for path in paths if not path.is_dir()}
    names = {name for name in names if any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)}
    _check_regular(folder, names)
    classes: list[Any] = []
    for name in names:
        if name.endswith("config.json"):
            classes += (_read_config(folder / name).get("auto_map") or {}).values()
    modules: list[str] = []
    for named in classes:  # of a tokenizer the slow class and the fast one, or None
        modules += [str(name).partition(".")[0] for name in (named if isinstance(named, list) else [named])]
    while modules:
        module = modules.pop()
        # code of another repository is `owner/name--module`; loading the model reports what is missing here
        if module.isidentifier() and os.path.lexists(folder / f"{module}.py") and f"{module}.py" not in names:
            _check_regular(folder, [f"{module}.py"])
            names.add(f"{module}.py")
            modules += get_relative_imports(folder / f"{module}.py")
    return names


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is broken: {error}. Copy or download it again.") from error


# ---- weights


def _whole_model(checkpoint: Path, dtype: torch.dtype | None, trust_remote_code: bool) -> PreTrainedModel:
    """Return the trained model in ``dtype``, or as it is stored."""
    in_files = any((checkpoint / file).is_file() for file in MODEL_FILES)
    stored = _stored_dtype(checkpoint) if in_files else _stored_dtype(checkpoint / STATE_FOLDER, WEIGHT_PREFIX)
    outputs = HeadSpec.saved(checkpoint)
    read_as = stored if dtype == torch.float16 else dtype or stored  # to see what float16 has no room for
    model: Any
    if in_files:
        model, info = load_classifier(str(checkpoint), outputs, dtype=read_as, trust_remote_code=trust_remote_code)
        if missing := sorted(info["missing_keys"])[:5]:
            raise UserError(f"{checkpoint} lacks weights: {', '.join(missing)}. Copy it anew.")
    else:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        model = model_without_weights(config, read_as, trust_remote_code).to_empty(device="cpu")
        model.tie_weights()
        read_weights(model, checkpoint, Runtime())
    fold_attributes(model, outputs)
    return _rounded(model, dtype or stored)


def _merged_model(
    checkpoint: Path, base: str | None, dtype: torch.dtype | None, trust_remote_code: bool
) -> PreTrainedModel:
    """Return the base model with the trained adapters merged in float32, then rounded once."""
    base, outputs = _base_name(checkpoint, base), HeadSpec.saved(checkpoint)
    kwargs: Any = {"num_labels": len(outputs.weights), "trust_remote_code": trust_remote_code}
    with tempfile.TemporaryDirectory() as adapters:  # peft loads adapters from a folder only
        _write_adapters(checkpoint, Path(adapters), base, None, trust_remote_code)
        model, info = load_classifier(base, outputs, dtype=torch.float32, **kwargs)
        trained = {name.removeprefix("base_model.model.") for name in load_file(Path(adapters, ADAPTER_FILE))}
        if random := sorted(set(info["missing_keys"]) - trained)[:5]:
            raise UserError(
                f"{', '.join(random)}: neither the adapters nor the base model {base} have a value, so it would be "
                "random. Train adapters with `modules_to_save` or `task_type='SEQ_CLS'`."
            )
        merged: Any = merge_adapters(model, adapters)
    if (checkpoint / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(str(checkpoint), trust_remote_code=trust_remote_code)
        if tokenizer.pad_token_id is not None:  # as in training: rewards are read at the last token that is not it
            merged.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    fold_attributes(merged, outputs)
    set_reward_normalization(merged.config, saved_scale(checkpoint))
    stored = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code).dtype
    return _rounded(merged, dtype or stored or torch.float32)


def _write_adapters(
    checkpoint: Path, folder: Path, base: str | None, dtype: torch.dtype | None, trust_remote_code: bool
) -> None:
    """Write the trained adapters as peft does."""
    if (checkpoint / ADAPTER_FILE).is_file():
        _stored_dtype(checkpoint)  # rejects a torn file
        weights = load_file(checkpoint / ADAPTER_FILE)
    else:
        stored = _stored_dtype(checkpoint / STATE_FOLDER, WEIGHT_PREFIX)
        config = AutoConfig.from_pretrained(_base_name(checkpoint, base), trust_remote_code=trust_remote_code)
        outputs = HeadSpec.saved(checkpoint)
        write_head_spec(config, [*outputs.attributes], outputs.weights, outputs.step_separator)
        model = model_without_weights(config, stored, trust_remote_code)
        adapted = empty_adapters(model, str(checkpoint), stored)
        read_weights(adapted, checkpoint, Runtime())
        weights = adapter_weights(adapted)
    _check_range(weights.items(), dtype)
    weights = {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / ADAPTER_FILE, {"format": "pt"})
    config = _read_config(checkpoint / ADAPTER_CONFIG)
    config |= {"inference_mode": True} | ({} if base is None else {"base_model_name_or_path": base})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _stored_dtype(folder: Path, prefix: str = "") -> torch.dtype:
    """Return the widest dtype of the weights in a folder's safetensors files whose names begin with ``prefix``.

    Raises:
        UserError: There are none, a file is torn, or shards of a weight are missing.
    """
    try:
        metadata = reader_of(folder).read_metadata().state_dict_metadata if folder.is_dir() else {}
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"A file in {folder} is torn: {error}. Copy it anew, or export another checkpoint.") from error
    dtypes = []
    for name, saved in metadata.items():
        if isinstance(saved, TensorStorageMetadata) and name.startswith(prefix):
            if sum(math.prod(chunk.sizes) for chunk in saved.chunks) != math.prod(saved.size):
                raise UserError(f"{folder} lacks shards of the weight {name}. A file is missing: copy it anew.")
            dtypes += [saved.properties.dtype] if saved.properties.dtype.is_floating_point else []
    if not dtypes:
        raise UserError(
            f"{folder} has no weights in safetensors, and pickled ones are not read, since they could run code. Give "
            "the folder of a checkpoint (`output_dir/checkpoint-N`) or of a saved model."
        )
    return reduce(torch.promote_types, dtypes)


def _rounded(model: Any, dtype: torch.dtype) -> PreTrainedModel:
    _check_range(model.named_parameters(), dtype)
    return model.to(dtype)


def _check_range(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> None:
    """Reject finite weights that would be written as infinite ones; only float16 has a much smaller range than others.

    Raises:
        UserError: A weight is too large for float16; names the first.
    """
    for name, tensor in weights if dtype == torch.float16 else ():
        if tensor.isfinite().all() and not tensor.to(dtype).isfinite().all():
            raise UserError(
                f"{name} has values that would become infinite in float16. Give `--dtype bfloat16`, which has the "
                "range of float32."
            )


def _base_name(checkpoint: Path, base: str | None) -> str:
    named = _read_config(checkpoint / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not (name := base or named) or not isinstance(name, str):
        raise UserError(f"{checkpoint / ADAPTER_CONFIG} names no base model. Give its folder or Hub id: `--base`.")
    return name
