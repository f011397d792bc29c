"""The YAML file that ``--config`` names: read it and export its ``env`` section.

This module imports nothing heavy, so that the command can export ``env`` before transformers and torch_xla are
imported: they read some variables (``USE_TORCH_XLA``, ``XLA_FLAGS``) once, on import.
"""

import copy
import os
import re
from collections.abc import Sequence
from functools import lru_cache
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
        UserError: ``--config`` without a file, a file that is not a YAML mapping with each key once, or an ``env``
            that no environment can hold.
        UserFileError: The file is not there or cannot be read.
    """
    path, rest = _split_flag(list(args))
    if path is None:
        return {}, rest
    values = read_config(path)
    env = values.pop("env", {})
    if not isinstance(env, dict):
        raise UserError(f"Config file {path}: the `env` field should be a dict in the YAML file; it is {env!r:.80}.")
    try:
        os.environ.update(env)
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"Config file {path}: `env` has a name or value that no environment can hold ({error}). Write '' for an "
            "empty value."
        ) from error
    return values, rest


def read_config(path: str) -> dict[str, Any]:
    """Read the mapping that a YAML file holds; once, until the file changes.

    Numbers and yes, no, on and off are text as they are written, and so are all values of ``env``: the flag that takes
    a value decides what it means, as on a command line. What is in mappings is read as YAML reads it.

    Raises:
        UserError: It is not UTF-8, not YAML, not a mapping, or has a key twice.
        UserFileError: It is not there or cannot be read.
    """
    try:
        return copy.deepcopy(_read(path, os.stat(path).st_mtime_ns))
    except OSError as error:
        raise UserFileError(f"Config file {path} cannot be read: {error.strerror}. Correct the path.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, a date such as 2001-13-45
        reason = " ".join(str(error).split())
        raise UserError(f"Config file {path} is not a YAML mapping in UTF-8: {reason}. Correct it there.") from error


@lru_cache(maxsize=1)
def _read(path: str, changed: int) -> dict[str, Any]:
    with open(path, encoding="utf-8-sig") as file:
        values = yaml.load(file, _Reader)  # noqa: S506  # a kind of SafeLoader
    if not isinstance(values, dict):
        raise ValueError(f"it holds {'nothing' if values is None else type(values).__name__}, not `name: value`")
    return values


_STR, _BOOL, _NULL, _MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "bool", "null", "merge"))


class _Reader(yaml.SafeLoader):
    """Reads YAML as flags are read, and refuses a key twice: PyYAML takes the last of them, and a user edits one."""

    def get_single_node(self) -> yaml.Node | None:
        root: yaml.Node | None = super().get_single_node()
        if isinstance(root, yaml.MappingNode):
            root.value = [
                (key if key.tag == _MERGE else _as_written(key), _as_written(value, is_env=key.value == "env"))
                for key, value in root.value
            ]
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]
        if twice := [name for name in names if names.count(name) > 1]:
            problem = f"the key {twice[0]!r} is there twice"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


_Reader.add_implicit_resolver(  # YAML 1.1 takes 1e-5 for text
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _as_written(node: yaml.Node, is_env: bool = False) -> yaml.Node:
    """Make text of a scalar and of those in a list, but for true, false and null; in ``env``, of all but null."""
    if isinstance(node, yaml.SequenceNode):
        return yaml.SequenceNode(node.tag, list(map(_as_written, node.value)), node.start_mark, node.end_mark)
    if isinstance(node, yaml.MappingNode) and is_env:
        pairs = [tuple(_as_written(each, is_env) for each in pair) for pair in node.value]
        return yaml.MappingNode(node.tag, pairs, node.start_mark, node.end_mark)
    is_switch = node.tag == _BOOL and node.value.lower() in ("true", "false") and not is_env
    if not isinstance(node, yaml.ScalarNode) or node.tag == _NULL or is_switch:
        return node
    return yaml.ScalarNode(_STR, node.value, node.start_mark, node.end_mark)  # a new one: aliases share the old


def _split_flag(args: list[str]) -> tuple[str | None, list[str]]:
    for index, word in enumerate(args):
        if word.startswith("--config="):
            return word.removeprefix("--config="), args[:index] + args[index + 1 :]
        if word == "--config":
            if index + 1 == len(args):
                raise UserError("`--config` needs the path of a YAML file after it.")
            return args[index + 1], args[:index] + args[index + 2 :]
    return None, args
