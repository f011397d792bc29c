"""What is wrong with a model's folder, found after loading it failed: the libraries' errors rarely name the file."""

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from trl_tpu.errors import UserError

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
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@contextmanager
def explaining(name: str, what: str = "a reward model") -> Iterator[None]:
    """Raise a UserError that says why `name`, a Hub id or folder, cannot be loaded as `what` meanwhile."""
    try:
        yield
    except UserError:
        raise
    except _LOADING_ERRORS as error:
        reason = " ".join(str(error).split())
        if len(reason) > 800:  # some libraries list every model they know
            reason = f"{reason[:500].rsplit(' ', 1)[0]} ..."
        fault = _fault(name, what) or f"{type(error).__name__}: {reason}"
        raise UserError(
            f"{name} cannot be loaded as {what}: {fault.rstrip('.')}. Correct the name, its files or what "
            "`model_init_kwargs` says."
        ) from error


def _fault(name: str, what: str) -> str | None:
    """Say which file of a model's folder is missing or broken, and how; None where that is not what is wrong."""
    folder = Path(name)
    if not folder.is_dir():
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or folder.exists()
        return f"there is no folder {folder.absolute()}" if is_path else None
    for file in filter(Path.is_file, sorted(folder.iterdir())):
        if file.stat().st_size < 200 and file.read_bytes().startswith(_LFS_POINTER):
            return f"{file} is a pointer of Git LFS and not the file itself; `git lfs pull` gets it"
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            elif file.suffix == ".safetensors":
                with safe_open(file, framework="pt"):
                    pass
        except (ValueError, SafetensorError) as error:
            return f"{file} ({file.stat().st_size} bytes) is broken: {error}; copy or download it again"
    if what == "a tokenizer" and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        return f"there is none of {', '.join(_TOKENIZER_FILES)} in {folder}; copy them from the model it is made from"
    return None if (folder / "config.json").exists() else f"there is no config.json in {folder}"


def mismatch(name: str, mismatched: Any) -> UserError:
    """Make the error to raise where weights have other shapes than the config says.

    Args:
        name: hub id or folder.
        mismatched: the weights' names, shapes in the file, and shapes in the model.
    """
    weights = sorted((str(key), tuple(saved), tuple(made)) for key, saved, made in mismatched)
    key, saved, made = weights[0]
    fix = "Correct the sizes in its config.json, or copy the weights that belong to it"
    if key.split(".")[0] in ("score", "classifier"):
        fix = (
            "It was saved with another number of labels, and a reward model has one output: start from the model that "
            "it was trained from, or give `model_init_kwargs={'ignore_mismatched_sizes': True}` for a new random head"
        )
    return UserError(
        f"{len(weights)} of the weights in {name} do not fit: {key} has the shape {saved} in the file and {made} in "
        f"the model. {fix}."
    )
