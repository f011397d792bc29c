"""What is wrong with a model's folder, found after loading it failed: the libraries' errors rarely name the file."""

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

# What transformers and what it reads with raise for folders that are not as they should be; a ValueError is also an
# unknown architecture, broken JSON, or text that is not UTF-8. Faults of a device (RuntimeError) are not among them.
_LOADING_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    SafetensorError,
    pickle.UnpicklingError,
    StrictDataclassError,
)
_LFS_POINTER = b"version https://git-lfs.github.com"


@contextmanager
def explaining(name: str, what: str = "a reward model") -> Iterator[None]:
    """While `name` (a hub id or folder) is loaded as `what`: raise ValueError that says why it cannot be."""
    try:
        yield
    except _LOADING_ERRORS as error:
        raise refusal(name, error, what) from error


def refusal(name: str, error: Exception, what: str) -> ValueError:
    """The error to raise where `name` cannot be loaded.

    Args:
        name: hub id or folder.
        error: what the library raised.
        what: what it should have been loaded as.

    Returns:
        An error that says which file is broken and how, or what the library said, and what to do.
    """
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if isinstance(error, KeyError):
        reason = f"the key {reason} is missing"
    if os.path.isdir(name):
        looks = (folder_fault, tokenizer_fault) if what == "a tokenizer" else (folder_fault,)
        if (fault := next((found for look in looks if (found := look(Path(name)))), None)) is not None:
            return ValueError(f"{name} cannot be loaded as {what}: {fault}")
    elif os.path.exists(name):
        return ValueError(f"{name} is a file, not {what}: name the folder that holds its config.json, or a Hub id.")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        return ValueError(f"There is no folder {name} (looked for {Path(name).absolute()}). Correct the path.")
    else:
        reason = f"there is no such folder, and from the Hub it cannot be had ({reason})"
    if "trust_remote_code" in reason:
        return ValueError(
            f"{name} brings custom code of its own, which is not run unless you trust it. Read that code, then set "
            "`trust_remote_code=True` (on the command line, `--trust_remote_code true`), or choose a model whose "
            "architecture transformers has."
        )
    if len(reason) > 600:  # some libraries list every model they know
        reason = f"{reason[:300].rsplit(' ', 1)[0]} ..."
    return ValueError(
        f"{name} cannot be loaded as {what}: {reason}. Correct the name, its config.json, or what `model_init_kwargs` "
        "says."
    )


def folder_fault(folder: Path) -> str | None:
    """Which file of a model's folder is missing or broken, how, and what to do; None if none is."""
    again = "Copy or download it again"
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            return f"{file} is not UTF-8 (byte {error.start}, {error.reason}). {again}."
        except json.JSONDecodeError as error:
            return f"{file} is not JSON (line {error.lineno}, column {error.colno}: {error.msg}). {again}."
        if not isinstance(content, dict):
            return f"{file} must hold a JSON object, not {type(content).__name__}. {again}."
        if file.name.endswith(".index.json") and (fault := _index_fault(file, content)) is not None:
            return f"{fault}. {again}."
    if not (folder / "config.json").exists():
        return (
            f"there is no config.json in {folder}. Name the folder that `save_pretrained` or a download filled, or "
            "copy the file from there."
        )
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    if not weights:
        return f"there are no weights (model.safetensors) in {folder}. Copy or download them too."
    faults = (fault for file in weights if (fault := _weights_fault(file)) is not None)
    return next((f"{fault} {again}." for fault in faults), None)


def tokenizer_fault(folder: Path) -> str | None:
    """That a folder has none of a tokenizer's files, and what to do; None if it has one."""
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        return None
    return (
        f"there is no tokenizer in {folder} (tokenizer.json, tokenizer.model, vocab.json or vocab.txt). Copy its "
        "files there from the model that it was trained from, or pass the tokenizer as `processing_class`."
    )


def _index_fault(file: Path, content: dict[str, Any]) -> str | None:
    shards = content.get("weight_map")
    if not isinstance(shards, dict):
        return f"{file} has no `weight_map`, which says which file holds which weight"
    missing = sorted({shard for shard in shards.values() if not (file.parent / shard).exists()})
    if not missing:
        return None
    return f"{len(missing)} of the {len(set(shards.values()))} files that {file} names are missing: {missing[0]}"


def _weights_fault(file: Path) -> str | None:
    with open(file, "rb") as start:
        if start.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return f"{file} is a pointer of Git LFS and not the weights; `git lfs pull` gets them."
    try:
        if file.suffix == ".bin":
            torch.load(file, map_location="meta", weights_only=True)
        else:
            with safe_open(file, framework="pt"):
                pass
    except SafetensorError as error:
        return f"{file} ({file.stat().st_size} bytes) is torn or is no safetensors file ({error})."
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        return f"{file} ({file.stat().st_size} bytes) holds no weights that are safe to read ({str(error):.80})."
    return None


def mismatch(name: str, mismatched: Any) -> ValueError:
    """The error to raise where weights have other shapes than the config says.

    Args:
        name: hub id or folder.
        mismatched: the weights' names, shapes in the file, and shapes in the model.
    """
    weights = sorted((str(key), tuple(saved), tuple(made)) for key, saved, made in mismatched)
    key, saved, made = weights[0]
    others = f", and {len(weights) - 1} more" if len(weights) > 1 else ""
    fix = "Correct the sizes in its config.json, or copy the weights that belong to it"
    if key.split(".")[0] in ("score", "classifier"):
        fix = (
            "A reward model has one output, and this one was saved with another number of labels. Start from the "
            "model that it was trained from, or give `model_init_kwargs={'ignore_mismatched_sizes': True}` for a new "
            "random head"
        )
    return ValueError(
        f"The weights in {name} do not fit: {key} has the shape {saved} in the file and {made} in the model{others}. "
        f"{fix}."
    )
