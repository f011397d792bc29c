"""The YAML file that ``--config`` names: read it and export its ``env`` section.

This module imports nothing heavy, so that the command can export ``env`` before transformers and torch_xla are
imported: they read some variables (``USE_TORCH_XLA``, ``XLA_FLAGS``) once, on import.
"""

import os
from collections.abc import Sequence
from typing import Any

import yaml


def take_config(args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split ``--config FILE`` off a command line, export the file's ``env`` section and return the rest of the file.

    Args:
        args: Command-line words; ``--config FILE`` and ``--config=FILE`` are both understood.

    Returns:
        The file's values without ``env`` (empty without ``--config``), and the words without ``--config``.

    Raises:
        ValueError: ``--config`` without a file, a file that is not a YAML mapping with text for keys, each once, or
            an ``env`` that no environment can hold.
        OSError: The file is not there or cannot be read.
    """
    path, rest = _split_flag(list(args))
    if path is None:
        return {}, rest
    values = read_config(path)
    env = values.pop("env", {})
    if not isinstance(env, dict):
        raise ValueError(
            f"`env` field should be a dict in the YAML file. In {path} it is {env!r}; write `env:` and below it, "
            "indented, `NAME: value`, or leave it out."
        )
    words = {str(name): str(value) for name, value in env.items()}
    for name, text in words.items():
        if not name or "=" in name or "\0" in name + text or not _has_bytes(name + text):
            raise ValueError(
                f"Config file {path}: `env` has {name!a}: {text!a}, which no environment can hold. A name must not be "
                "empty or hold `=`, and neither name nor value a NUL character or half of a surrogate pair."
            )
    os.environ.update(words)
    return values, rest


def read_config(path: str) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ValueError: It is not UTF-8, not YAML, not a mapping, or has a key that is not text or is there twice.
        OSError: It is not there or cannot be read.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"Config file {path} is a folder: name the YAML file in it.")
    try:
        with open(path, encoding="utf-8-sig") as file:
            values = yaml.load(file.read(), _UniqueKeys)  # noqa: S506  # a kind of SafeLoader
    except UnicodeDecodeError as error:
        content = error.object
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"Config file {path} is not UTF-8: line {line}, byte {error.start} of the file is "
            f"0x{content[error.start]:02x}. Save it as UTF-8."
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2001-13-45
        raise ValueError(f"Config file {path} is not valid YAML: {_fault(error)}. Correct it there.") from error
    if not isinstance(values, dict):
        raise ValueError(
            f"Config file {path} must contain a YAML mapping (`name: value`), not "
            f"{'nothing' if values is None else type(values).__name__}."
        )
    if others := [key for key in values if not isinstance(key, str)]:
        raise ValueError(
            f"Config file {path}: the key {others[0]!r} is a {type(others[0]).__name__}, but the names of arguments "
            "are text. Correct or remove it."
        )
    return values


class _UniqueKeys(yaml.SafeLoader):
    """YAML forbids a key twice in a mapping, PyYAML takes the last: a user who edits the other trains on the old."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if (first := lines.setdefault((key.tag, key.value), line)) != line:
                    problem = f"the key {key.value!r} is there twice, first in line {first}"
                    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def _has_bytes(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _fault(error: Exception) -> str:
    """What is wrong and where, in one line."""
    if isinstance(error, RecursionError):
        return "its lists and mappings are nested too deeply"
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else problem
    return " ".join(str(error).split())


def _split_flag(args: list[str]) -> tuple[str | None, list[str]]:
    for index, word in enumerate(args):
        if word.startswith("--config="):
            return word.removeprefix("--config="), args[:index] + args[index + 1 :]
        if word == "--config":
            if index + 1 == len(args):
                raise ValueError("`--config` needs the path of a YAML file after it.")
            return args[index + 1], args[:index] + args[index + 2 :]
    return None, args
