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
        ValueError: ``--config`` without a file, a file that is not a YAML mapping, an ``env`` that is not a mapping.
        FileNotFoundError: There is no such file.
    """
    path, rest = _split_flag(list(args))
    if path is None:
        return {}, rest
    with open(path, encoding="utf-8") as file:
        try:
            values = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise ValueError(f"Config file {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(
            f"Config file {path} must contain a YAML mapping (`name: value`), not {type(values).__name__}."
        )
    values = dict(values)
    env = values.pop("env", {})
    if not isinstance(env, dict):
        raise ValueError(f"`env` field should be a dict in the YAML file. In {path} it is {env!r}.")
    for name, value in env.items():
        os.environ[name] = str(value)
    return values, rest


def _split_flag(args: list[str]) -> tuple[str | None, list[str]]:
    for index, word in enumerate(args):
        if word.startswith("--config="):
            return word.removeprefix("--config="), args[:index] + args[index + 1 :]
        if word == "--config":
            if index + 1 == len(args):
                raise ValueError("`--config` needs the path of a YAML file after it.")
            return args[index + 1], args[:index] + args[index + 2 :]
    return None, args
