"""Write the model in a checkpoint to a folder that ``from_pretrained`` reads, in plain torch.

transformers and peft read, convert, merge and write. The host holds the model once: in the dtype that is written, or
in float32 where adapters are merged.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from ..errors import UserError
from ..modeling import broken
from ..modeling.adapters import adapter_weights, empty_adapters, merge_adapters
from ..modeling.load import without_load_report
from ..runtime.native import NativeRuntime
from .manifest import MANIFEST_FILE, find_faults
from .remote import is_url, local_copy
from .state_dict import STATE_FOLDER, read_weights

MODEL_FILES = ("model.safetensors", "model.safetensors.index.json")
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
#: files of a checkpoint that go with the model: config, tokenizer, chat template, the model's own code
_COMPANIONS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md")
_OF_TRAINING = {MANIFEST_FILE, "trainer_state.json", "progress.json", "reward_metrics.json", ADAPTER_CONFIG}


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

    The folder appears when it is complete.

    Args:
        checkpoint: A checkpoint of this trainer or of transformers', or the folder of a saved model or of adapters; at
            a URL of fsspec's (`gs://...`) it is copied to below TMPDIR first.
        out: The new folder.
        merge: Whether to merge adapters into their base model.
        base: Folder or Hub id of that base model; the one that the adapters name when None.
        dtype: Of the weights; None leaves them as they were trained (merged ones: as the base model is stored).
        max_shard_size: Of one file, such as "5GB".
        trust_remote_code: Whether the model may bring its own code.

    Raises:
        UserError: The checkpoint is damaged, has no weights in safetensors, or lacks some; `out` exists; `merge` or
            `base` do not fit what the checkpoint is.
    """
    out = _new_folder(out)
    staging = out.with_name(f".{out.name}.unfinished")
    with local_copy(checkpoint) as folder:
        has_adapters = (folder / ADAPTER_CONFIG).is_file()
        _check(folder, merge, base, has_adapters)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            _copy_companions(folder, staging)
            if not has_adapters:
                _whole_model(folder, dtype, trust_remote_code).save_pretrained(staging, max_shard_size=max_shard_size)
            elif merge:
                merged = _merged_model(folder, _base_name(folder, base), dtype, trust_remote_code)
                merged.save_pretrained(staging, max_shard_size=max_shard_size)
            else:
                _write_adapters(folder, staging, base, dtype, trust_remote_code)
            os.replace(staging, out)  # also over an empty folder
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _new_folder(out: str | Path) -> Path:
    if is_url(str(out)):
        raise UserError(f"{out} is a URL. Give a new folder of this machine, and copy it there from here.")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists, and nothing is written over. Give a new folder, or delete it first.")
    return out


def _check(checkpoint: Path, merge: bool, base: str | None, has_adapters: bool) -> None:
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} is no folder. Give the folder of a checkpoint or of a saved model.")
    if merge and not has_adapters:
        raise UserError(f"There is nothing to merge: {checkpoint} has no {ADAPTER_CONFIG}. Leave `--merge` out.")
    if base is not None and not has_adapters:
        raise UserError(f"{checkpoint} is a whole model, so `--base` has no use. Leave it out.")
    if not has_adapters and not (checkpoint / "config.json").is_file():
        raise UserError(f"{checkpoint} has no config.json, by which the model is built. Copy it there.")
    if (checkpoint / MANIFEST_FILE).exists() and (wrong := find_faults(checkpoint)):
        raise UserError(f"The checkpoint {checkpoint} is damaged: {'; '.join(wrong)}. Export another one.")


def _copy_companions(checkpoint: Path, folder: Path) -> None:
    for path in checkpoint.iterdir():
        if path.suffix in _COMPANIONS and path.name not in _OF_TRAINING and ".index." not in path.name:
            shutil.copyfile(path, folder / path.name)
    templates = checkpoint / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name)


def _whole_model(checkpoint: Path, dtype: torch.dtype | None, trust_remote_code: bool) -> PreTrainedModel:
    """Return the trained model, in the dtype that is asked for."""
    if any((checkpoint / file).is_file() for file in MODEL_FILES):
        stored_dtype = _stored_dtype(checkpoint)
        model, missing = _load(str(checkpoint), dtype=dtype or stored_dtype, trust_remote_code=trust_remote_code)
        if missing:
            raise UserError(f"{checkpoint} lacks weights: {', '.join(missing[:5])}. Copy it anew.")
        return model
    stored_dtype = _stored_dtype(checkpoint / STATE_FOLDER, "model.")
    model = _without_memory(str(checkpoint), dtype or stored_dtype, trust_remote_code).to_empty(device="cpu")
    model.tie_weights()
    read_weights(model, checkpoint, NativeRuntime())
    return model


def _write_adapters(
    checkpoint: Path, folder: Path, base: str | None, dtype: torch.dtype | None, trust_remote_code: bool
) -> None:
    """Write the trained adapters as peft does."""
    if (checkpoint / ADAPTER_FILE).is_file():
        weights = load_file(checkpoint / ADAPTER_FILE)
    else:
        stored_dtype = _stored_dtype(checkpoint / STATE_FOLDER, "model.")
        name = _base_name(checkpoint, base)
        model = _without_memory(name, stored_dtype, trust_remote_code)
        with _explaining_misfit(checkpoint, name):
            adapted = empty_adapters(model, str(checkpoint), stored_dtype)
            read_weights(adapted, checkpoint, NativeRuntime())
        weights = adapter_weights(adapted)
    weights = {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / ADAPTER_FILE, {"format": "pt"})
    config = json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    config |= {"inference_mode": True} | ({} if base is None else {"base_model_name_or_path": base})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _merged_model(checkpoint: Path, base: str, dtype: torch.dtype | None, trust_remote_code: bool) -> PreTrainedModel:
    """Return the base model with the trained adapters merged in float32, then rounded once."""
    with tempfile.TemporaryDirectory() as adapters:
        _write_adapters(checkpoint, Path(adapters), base, None, trust_remote_code)
        model, missing = _load(base, dtype=torch.float32, num_labels=1, trust_remote_code=trust_remote_code)
        trained = {name.removeprefix("base_model.model.") for name in load_file(Path(adapters, ADAPTER_FILE))}
        if random := [name for name in missing if name not in trained]:
            raise UserError(
                f"{', '.join(random[:5])}: neither the adapters nor the base model {base} have a value, so it would "
                "be random. A reward head is saved with the adapters when it is trained whole: "
                "`modules_to_save` or `task_type='SEQ_CLS'` in the peft config."
            )
        with _explaining_misfit(checkpoint, base):
            merged: Any = merge_adapters(model, adapters)
    if (checkpoint / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        if tokenizer.pad_token_id is not None:  # as in training: rewards are read at the last token that is not it
            merged.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    stored_dtype = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code).dtype
    return merged.to(dtype or stored_dtype or torch.float32)


def _load(name: str, **kwargs: Any) -> tuple[PreTrainedModel, list[str]]:
    """Return a model on the host, and which of its weights its files lack."""
    with broken.explaining(name), without_load_report():
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
    if info["mismatched_keys"]:
        raise broken.mismatch(name, info["mismatched_keys"])
    return model, sorted(info["missing_keys"])


def _without_memory(name: str, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model that a config describes, on the meta device."""
    trust = {"trust_remote_code": trust_remote_code}
    with broken.explaining(name), torch.device("meta"):
        config = AutoConfig.from_pretrained(name, num_labels=1, **trust)
        return AutoModelForSequenceClassification.from_config(config, dtype=dtype, **trust)


def _stored_dtype(folder: Path, prefix: str = "") -> torch.dtype:
    """Return the widest dtype of the weights in a folder's safetensors files whose names begin with ``prefix``.

    Raises:
        UserError: There are none, a file is torn, or shards of a weight are missing.
    """
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata if folder.is_dir() else {}
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"A file in {folder} is torn: {error}. Copy it anew, or export another checkpoint.") from error
    dtypes = []
    for name, saved in found.items():
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


def _base_name(checkpoint: Path, base: str | None) -> str:
    name = base or json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise UserError(f"{checkpoint / ADAPTER_CONFIG} names no base model. Give its folder or Hub id: `--base`.")
    return name


@contextmanager
def _explaining_misfit(checkpoint: Path, base: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, RuntimeError, UserWarning, ValueError) as error:
        reason = str(error).rstrip(".")
        raise UserError(
            f"The adapters in {checkpoint} do not fit the base model {base}: {reason}. Give the one that they were "
            "trained on: `--base`."
        ) from error
