"""What is wrong with a model's folder, found after loading it failed: the libraries' errors rarely name the file."""

import json
import pickle
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from ..errors import UserError

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


@contextmanager
def explaining(name: str, what: str = "a reward model") -> Iterator[None]:
    """Raise a UserError that says why `name`, a Hub id or folder, cannot be loaded as `what` meanwhile."""
    try:
        yield
    except UserError:
        raise
    except _LOADING_ERRORS as error:
        reason = textwrap.shorten(str(error), 800)  # some libraries list every model they know
        fault = _fault(name) or f"{type(error).__name__}: {reason}"
        raise UserError(
            f"{name} cannot be loaded as {what}: {fault.rstrip('.')}. Correct the name, its files or what "
            "`model_init_kwargs` says."
        ) from error


def _fault(name: str) -> str | None:
    """Say which file of a model's folder is broken, and how; None where that is not what is wrong."""
    folder = Path(name)
    if not folder.is_dir():
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or folder.exists()
        return f"there is no folder {folder.absolute()}" if is_path else None
    for file in filter(Path.is_file, sorted(folder.iterdir())):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            elif file.suffix == ".safetensors":
                with safe_open(file, framework="pt"):
                    pass
        except (ValueError, SafetensorError) as error:
            return f"{file} ({file.stat().st_size} bytes) is broken: {error}; copy or download it again"
    return None
