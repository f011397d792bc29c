"""The YAML file of ``--config``. Imports are light: the command exports the file's ``env`` before heavy imports."""

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

import yaml

from trl_tpu.errors import UserError, explaining


def take_config(args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Take ``--config FILE`` out of a command line, export the file's ``env`` section and return its other values.

    Args:
        args: Command-line arguments; ``--config FILE`` and ``--config=FILE`` both work.

    Returns:
        The file's values without ``env`` (empty without ``--config``), and the arguments without ``--config``.
        Numbers, yes, no, on, off and all values of ``env`` are returned as text, exactly as written in the file: the
        flag that takes the value converts it, as on a command line. Values inside other mappings have YAML's types.

    Raises:
        UserError: The file is not a YAML mapping in UTF-8, has a key twice, or has an ``env`` that cannot be exported.
        UserFileError: The file does not exist or cannot be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    options, rest = parser.parse_known_args(args)
    if (path := options.config) is None:
        return {}, rest
    with explaining(f"Config file {path} cannot be read as YAML in UTF-8", "Correct it."):
        with open(path, encoding="utf-8-sig") as file:
            content = file.read()
        values, texts = (yaml.load(content, loader) for loader in (_Loader, _TextLoader))  # noqa: S506  # safe loaders
    if not isinstance(values, dict):
        raise UserError(f"Config file {path} is not a YAML mapping, `name: value`.")
    settings = {name: _as_text(value, texts[name]) for name, value in zip(texts, values.values(), strict=True)}
    if settings.pop("env", None):
        with explaining(f"{path}: `env` field should be a dict in the YAML file.", "Correct it."):
            os.environ.update(texts["env"])
    return settings, rest


def _as_text(value: Any, text: Any) -> Any:
    """Return a value as text, also in lists. True, false, null and mappings keep YAML's types."""
    if isinstance(value, list):
        return [_as_text(*both) for both in zip(value, text, strict=True)]
    return value if value is None or isinstance(value, dict) or text.lower() in ("true", "false") else text


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-5 as a number. YAML 1.1 reads it as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class _TextLoader(yaml.SafeLoader):
    """YAML loader that reads all scalars as text, and rejects duplicate keys."""

    yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}  # `<<` merges mappings

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in keys[:place] and key.value != "<<":  # PyYAML accepts a duplicate
                problem = f"the key {key.value!r} occurs twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)
