"""Which files of a folder are a model's: those that go with its weights when it is exported.

A folder may hold anything beside them, and links to anything. What is in no list here stays where it is.
"""

import json
import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_imports

from ..errors import UserError
from ..modeling.engines import BASE_CONFIG

ADAPTER_CONFIG = "adapter_config.json"
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


def companions(folder: Path) -> list[str]:
    """Return the names of the files that go with a model's weights: configs, tokenizer, templates, card, its own code.

    Raises:
        UserError: One is a link or no file, or a config is broken.
    """
    found = [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]
    names = [path.relative_to(folder).as_posix() for path in found if not path.is_dir()]
    names = [name for name in names if any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)]
    check_regular(folder, names)
    return sorted({*names, *_own_code(folder, [name for name in names if name.endswith("config.json")])})


def check_regular(folder: Path, names: Iterable[str]) -> None:
    """Refuse files that would bring others with them: what links lead to is not part of the folder.

    Raises:
        UserError: One of ``names`` in ``folder`` is, or is reached by, a link; or it is no file.
    """
    root = os.path.realpath(folder)
    for name in names:
        path = folder / name
        if os.path.realpath(path) != os.path.join(root, name) or not path.is_file():
            raise UserError(
                f"{path} is a link or no regular file, and neither is exported. If it is meant to be part of the "
                f"model, put a copy in its place: cp -rL {folder} NEW_FOLDER"
            )


def read_config(path: Path) -> dict[str, Any]:
    """Return what is in a JSON file of settings.

    Raises:
        UserError: It is torn, or something else.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is broken: {error}. Copy or download it again.") from error


def _own_code(folder: Path, configs: Iterable[str]) -> set[str]:
    """Return the names of the files of code that ``configs`` name in their ``auto_map``, and of what those import."""
    found: set[str] = set()
    waiting: list[str] = []
    for name in configs:
        for each in (read_config(folder / name).get("auto_map") or {}).values():
            # of a tokenizer, the slow class and the fast one, or None
            waiting += [str(name).partition(".")[0] for name in (each if isinstance(each, list) else [each])]
    while waiting:
        module = waiting.pop()
        # the code of another repository is `owner/name--module`, and what is missing here is for its reader to say
        if module.isidentifier() and os.path.lexists(folder / f"{module}.py") and f"{module}.py" not in found:
            check_regular(folder, [f"{module}.py"])
            found.add(f"{module}.py")
            waiting += get_relative_imports(folder / f"{module}.py")
    return found
