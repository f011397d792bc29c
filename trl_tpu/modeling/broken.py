"""What is wrong with a model's folder, found after loading it failed: the libraries' errors rarely name the file."""

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import UserError


@contextmanager
def explaining(name: str, what: str = "a reward model") -> Iterator[None]:
    """Raise a UserError that says why `name`, a Hub id or folder, cannot be loaded as `what` meanwhile."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of transformers, of what it reads with, or of a model's own code
        reason = textwrap.shorten(str(error), 800)  # some libraries list every model they know
        fault = _broken_file(Path(name)) or f"{type(error).__name__}: {reason}"
        raise UserError(
            f"{name} cannot be loaded as {what}: {fault.rstrip('.')}. Correct the name, its files or what "
            "`model_init_kwargs` says."
        ) from error


def _broken_file(folder: Path) -> str | None:
    """Name the first file of a model's folder that cannot be read, and say why; None where all can."""
    for file in sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors")):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            else:
                safe_open(file, framework="pt").__exit__(None, None, None)
        except (OSError, ValueError, SafetensorError) as error:
            return f"{file} is broken: {error}; copy or download it again"
    return None
