"""The YAML file that ``--config`` names: read it and export its ``env`` section.

This module imports nothing heavy, so that the command can export ``env`` before transformers and torch_xla are
imported: they read some variables (``USE_TORCH_XLA``, ``XLA_FLAGS``) once, on import.
"""

import os
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
        UserError: ``--config`` without a file, a file that is not a YAML mapping with text for keys, each once, or
            an ``env`` that no environment can hold.
        UserFileError: The file is not there or cannot be read.
    """
    path, rest = _split_flag(list(args))
    if path is None:
        return {}, rest
    values = read_config(path)
    env = values.pop("env", {})
    if not isinstance(env, dict):
        raise UserError(
            f"`env` field should be a dict in the YAML file. In {path} it is {env!r}; write `env:` and below it, "
            "indented, `NAME: value`, or leave it out."
        )
    try:
        os.environ.update({str(name): str(value) for name, value in env.items()})
    except (OSError, ValueError) as error:
        raise UserError(
            f"Config file {path}: `env` has a name or value that no environment can hold ({error}). Correct it."
        ) from error
    return values, rest


def read_config(path: str) -> dict[str, Any]:
    """Read the mapping that a YAML file holds.

    Raises:
        UserError: It is not UTF-8, not YAML, not a mapping, or has a key that is not text or is there twice.
        UserFileError: It is not there or cannot be read.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            values = yaml.load(file, _UniqueKeys)  # noqa: S506  # a kind of SafeLoader
    except OSError as error:
        raise UserFileError(f"Config file {path} cannot be read: {error.strerror}. Correct the path.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, a date such as 2001-13-45
        reason = " ".join(str(error).split())
        raise UserError(f"Config file {path} is not valid YAML in UTF-8: {reason}. Correct it there.") from error
    if not isinstance(values, dict):
        raise UserError(
            f"Config file {path} must contain a YAML mapping (`name: value`), not "
            f"{'nothing' if values is None else type(values).__name__}."
        )
    if others := [key for key in values if not isinstance(key, str)]:
        raise UserError(f"Config file {path}: the key {others[0]!r} is not text. Correct or remove it.")
    return values


class _UniqueKeys(yaml.SafeLoader):
    """YAML forbids a key twice in a mapping, PyYAML takes the last: a user who edits the other trains on the old."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    problem = f"the key {key.value!r} is there twice"
                    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def _split_flag(args: list[str]) -> tuple[str | None, list[str]]:
    for index, word in enumerate(args):
        if word.startswith("--config="):
            return word.removeprefix("--config="), args[:index] + args[index + 1 :]
        if word == "--config":
            if index + 1 == len(args):
                raise UserError("`--config` needs the path of a YAML file after it.")
            return args[index + 1], args[:index] + args[index + 2 :]
    return None, args
