"""Export of a checkpoint without its devices: one tensor at a time, in plain torch."""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from ..modeling.adapters import saved_adapter_names, with_adapters_of
from ..modeling.load import load_model
from .manifest import MANIFEST_FILE, find_faults
from .merge_adapters import Merger
from .model_writer import ModelWriter, shape_of
from .remote import is_url, local_copy
from .stored_weights import Stored, StoredFiles, stored_weights
from .weight_files import ADAPTER_FILE, MODEL_FILE, WeightFiles

logger = logging.getLogger(__name__)

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
        ValueError: The checkpoint is damaged, has no weights in safetensors, or lacks some; `out` exists; `merge` or
            `base` do not fit what the checkpoint is.
    """
    out = _new_folder(out)
    aside = out.with_name(f".{out.name}.unfinished")
    with local_copy(checkpoint) as folder:
        adapters = (folder / ADAPTER_CONFIG).is_file()
        _check(folder, merge, base, adapters)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            if not adapters:
                _write_model(folder, aside, dtype, max_shard_size, trust_remote_code)
            elif merge:
                _write_merged(folder, aside, base, dtype, max_shard_size, trust_remote_code)
            else:
                _write_adapters(folder, aside, base, dtype, trust_remote_code)
            _copy_companions(folder, aside)
            os.replace(aside, out)  # also over an empty folder
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _new_folder(out: str | Path) -> Path:
    if is_url(str(out)):
        raise ValueError(f"{out} is a URL. Give a new folder of this machine, and copy it there from here.")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists, and nothing is written over. Give a new folder, or delete it first.")
    return out


def _check(checkpoint: Path, merge: bool, base: str | None, adapters: bool) -> None:
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint} is no folder. Give the folder of a checkpoint or of a saved model.")
    if merge and not adapters:
        raise ValueError(f"There is nothing to merge: {checkpoint} has no {ADAPTER_CONFIG}. Leave `--merge` out.")
    if base is not None and not adapters:
        raise ValueError(f"{checkpoint} is a whole model, so `--base` has no use. Leave it out.")
    if (checkpoint / MANIFEST_FILE).exists() and (wrong := find_faults(checkpoint)):
        raise ValueError(f"The checkpoint {checkpoint} is damaged: {'; '.join(wrong)}. Export another one.")


def _write_model(
    checkpoint: Path, folder: Path, dtype: torch.dtype | None, max_shard_size: int | str, trust_remote_code: bool
) -> None:
    if not (checkpoint / "config.json").is_file():
        raise ValueError(f"{checkpoint} has no config.json, by which the model is built. Copy it there.")
    stored = stored_weights(checkpoint)
    if isinstance(stored, StoredFiles):
        _copy_weights(stored, {name: name for name in stored.tensors}, folder, dtype, max_shard_size)
    else:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        model = _without_memory(config, trust_remote_code)
        _check_shapes(model, stored.tensors, checkpoint)
        with ModelWriter(model, stored.tensors, folder, max_shard_size, dtype) as writer:
            for name in stored.tensors:
                writer.put(name, stored.read(name))
    written = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if dtype is not None:
        written.pop("torch_dtype", None)  # its name in transformers 4
        written["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _write_adapters(
    checkpoint: Path, folder: Path, base: str | None, dtype: torch.dtype | None, trust_remote_code: bool
) -> None:
    stored = stored_weights(checkpoint, ADAPTER_FILE)
    if isinstance(stored, StoredFiles):
        names = {name: name for name in stored.tensors}
    else:
        config = _config(checkpoint, _base_name(checkpoint, base), trust_remote_code)
        adapted: Any = with_adapters_of(_without_memory(config, trust_remote_code), str(checkpoint))
        names = saved_adapter_names(adapted, stored.tensors)
    _copy_weights(stored, names, folder, dtype, max_shard_size="1000TB", file=ADAPTER_FILE)  # peft reads one file
    written = json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    written["inference_mode"] = True
    if base is not None:
        written["base_model_name_or_path"] = base
    (folder / ADAPTER_CONFIG).write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_merged(
    checkpoint: Path,
    folder: Path,
    base: str | None,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    trust_remote_code: bool,
) -> None:
    name = _base_name(checkpoint, base)
    config = _config(checkpoint, name, trust_remote_code)
    config.dtype = dtype or getattr(config, "dtype", None) or torch.float32
    plain = _without_memory(config, trust_remote_code)
    adapted: Any = with_adapters_of(_without_memory(config, trust_remote_code), str(checkpoint))
    _read_adapters(adapted, checkpoint)
    with ModelWriter(plain, _shapes(plain), folder, max_shard_size, config.dtype) as writer:
        merger = Merger(adapted, plain, writer.put)

        def take(_: Any, weight: str, tensor: torch.Tensor) -> torch.Tensor:
            merger.take(weight, tensor)
            return tensor.new_zeros(()).expand(tensor.shape)  # has the shape, and no memory

        read = load_model(name, model_init_kwargs={"dtype": "auto"}, trust_remote_code=trust_remote_code, place=take)
        for weight, buffer in read.named_buffers():
            merger.take(weight, buffer)
        if missing := merger.missing():
            raise ValueError(
                f"{', '.join(missing[:5])}: neither the adapters nor the base model {name} have a value, so it would "
                "be random. A reward head is saved with the adapters when it is trained whole: "
                "`modules_to_save` or `task_type='SEQ_CLS'` in the peft config."
            )
    config.architectures = [type(plain).__name__]
    config.save_pretrained(folder)


def _read_adapters(adapted: Any, checkpoint: Path) -> None:
    stored = stored_weights(checkpoint, ADAPTER_FILE)
    of_model = saved_adapter_names(adapted, adapted.state_dict())
    if isinstance(stored, StoredFiles):
        values = {name: stored.read(saved) for name, saved in of_model.items() if saved in stored.tensors}
    else:
        values = {name: stored.read(name) for name in stored.tensors}
    if missing := sorted(of_model.keys() - values.keys()):
        raise ValueError(f"The adapters in {checkpoint} are not complete: {', '.join(missing[:5])} is missing.")
    own = adapted.state_dict()
    for name, value in values.items():
        if name not in own or own[name].shape != value.shape:
            expected = list(own[name].shape) if name in own else "no such weight"
            raise ValueError(
                f"The adapters in {checkpoint} were trained on another base model: their {name} is "
                f"{list(value.shape)}, and on this base it would be {expected}. Give the right one: `--base`."
            )
    adapted.load_state_dict(values, strict=False, assign=True)


def _copy_weights(
    stored: Stored,
    names: Mapping[str, str],
    folder: Path,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    file: str = MODEL_FILE,
) -> None:
    shapes = {written: shape_of(stored.tensors[name], dtype) for name, written in names.items()}
    with WeightFiles(folder, shapes, max_shard_size, file) as files:
        for name, written in names.items():
            files.write(written, stored.read(name).to(shapes[written].dtype))


def _without_memory(config: Any, trust_remote_code: bool) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)


def _shapes(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: shape_of(tensor) for name, tensor in model.state_dict().items()}


def _check_shapes(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], checkpoint: Path) -> None:
    own = _shapes(model)
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            expected = f"{list(own[name].shape)}" if name in own else "no such weight"
            raise ValueError(
                f"{checkpoint}/config.json is of another model than the state beside it: {name} is "
                f"{list(tensor.shape)}, and {type(model).__name__} has {expected}."
            )


def _base_name(checkpoint: Path, base: str | None) -> str:
    name = base or json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{checkpoint / ADAPTER_CONFIG} names no base model. Give its folder or Hub id: `--base`.")
    return name


def _config(checkpoint: Path, base: str, trust_remote_code: bool) -> Any:
    """The config of the model with the adapters; peft does not save one, but with its tokenizer it can be made."""
    if (checkpoint / "config.json").is_file():
        return AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(base, num_labels=1, trust_remote_code=trust_remote_code)
    if (checkpoint / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        if tokenizer.pad_token_id is not None:  # as in training: rewards are read at the last token that is not it
            config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return config


def _copy_companions(checkpoint: Path, folder: Path) -> None:
    for path in checkpoint.iterdir():
        companion = path.suffix in _COMPANIONS and path.name not in _OF_TRAINING
        if companion and not path.name.endswith(".safetensors.index.json") and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    templates = checkpoint / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name)
