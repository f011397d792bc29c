"""The YAML file that ``--config`` names: read it and export its ``env`` section.

This module imports nothing heavy, so that the command can export ``env`` before transformers and torch_xla are
imported: they read some variables (``USE_TORCH_XLA``, ``XLA_FLAGS``) once, on import.
"""

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

import yaml

from trl_tpu.errors import UserError, UserFileError


def take_config(args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split ``--config FILE`` off a command line, export the file's ``env`` section and return the rest of the file.

    Args:
        args: Command-line words; ``--config FILE`` and ``--config=FILE`` are both understood.

    Returns:
        The file's values without ``env`` (empty without ``--config``), and the words without ``--config``.

    Raises:
        UserError: A file that is not a YAML mapping with each key once, or an ``env`` that no environment can hold.
        UserFileError: The file is not there or cannot be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    found, rest = parser.parse_known_args(args)
    if found.config is None:
        return {}, rest
    values = read_config(found.config)
    try:
        os.environ.update(values.pop("env", {}))
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{found.config}: `env` field should be a dict in the YAML file. ({error})") from error
    return values, rest


def read_config(path: str) -> dict[str, Any]:
    """Read the mapping that a YAML file holds.

    Numbers and yes, no, on and off are text as they are written, and so are all values of ``env``: the flag that takes
    a value decides what it means, as on a command line. What is in mappings is read as YAML reads it.

    Raises:
        UserError: It is not UTF-8, not YAML, not a mapping, or has a key twice.
        UserFileError: It is not there or cannot be read.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
        values = yaml.load(text, _Reader)  # noqa: S506  # a kind of SafeLoader
        written = yaml.load(text, yaml.BaseLoader)  # noqa: S506  # makes text of every scalar
    except OSError as error:
        raise UserFileError(f"Config file {path} cannot be read: {error.strerror}. Correct the path.") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, a date such as 2001-13-45
        raise UserError(f"Config file {path} is not YAML in UTF-8: {' '.join(str(error).split())}.") from error
    if not isinstance(values, dict):
        raise UserError(f"Config file {path} is not a YAML mapping, `name: value`.")
    read = {str(name): _as_written(value, written.get(name, value)) for name, value in values.items()}
    return read | {name: written[name] for name in ("env",) if name in written}


class _Reader(yaml.SafeLoader):
    """Reads YAML, and refuses a key twice: PyYAML takes the last of them, and a user edits one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if key.value in names:
                problem = f"the key {key.value!r} is there twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)


_Reader.add_implicit_resolver(  # YAML 1.1 takes 1e-5 for text
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _as_written(value: Any, written: Any) -> Any:
    """Return the text of a value and of those in a list, but for true, false, null and mappings."""
    if isinstance(value, list):
        return [_as_written(*each) for each in zip(value, written, strict=True)]
    is_switch = isinstance(value, bool) and written.lower() in ("true", "false")
    return value if value is None or isinstance(value, dict) or is_switch else written
