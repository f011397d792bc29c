"""The YAML file of ``--config``. Imports are light: the command exports the file's ``env`` before heavy imports."""

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

import yaml

from trl_tpu.errors import UserError, UserFileError


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
    try:
        with open(path, encoding="utf-8-sig") as file:
            values = yaml.load(file, _ConfigLoader)  # noqa: S506  # a subclass of SafeLoader
    except OSError as error:
        raise UserFileError(f"Config file {path} cannot be read: {error.strerror}. Correct the path.") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date such as 2001-13-45
        raise UserError(f"Config file {path} is not YAML in UTF-8: {' '.join(str(error).split())}.") from error
    if not isinstance(values, dict):
        raise UserError(f"Config file {path} is not a YAML mapping, `name: value`.")
    try:
        os.environ.update(values.pop("env", None) or {})
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{path}: `env` field should be a dict in the YAML file. ({error})") from error
    return values, rest


class _ConfigLoader(yaml.SafeLoader):
    """YAML loader that keeps scalars outside inner mappings as text, and rejects duplicate keys."""

    def construct_document(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.MappingNode):
            return super().construct_document(node)
        values: dict[str, Any] = {}
        for name, value in self.pairs(node):
            is_env = name == "env" and isinstance(value, yaml.MappingNode)
            values[name] = {key: text.value for key, text in self.pairs(value)} if is_env else self.as_text(value)
        return values

    def as_text(self, node: yaml.Node) -> Any:
        """Return scalars, also in lists, as text; true, false, null and mappings have YAML's types."""
        kind = node.tag.rpartition(":")[2]
        if kind == "seq":
            return [self.as_text(item) for item in node.value]
        is_true_or_false = kind == "bool" and node.value.lower() in ("true", "false")
        is_text = kind in ("bool", "int", "float", "timestamp") and not is_true_or_false
        return node.value if is_text else self.construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.pairs(node)
        return super().construct_mapping(node, deep)

    def pairs(self, node: yaml.MappingNode) -> list[tuple[str, Any]]:
        """Return names and values, including values merged by `<<`. Reject duplicate keys: PyYAML accepts them."""
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for place, key in enumerate(keys):
            if key.value in [earlier.value for earlier in keys[:place]]:
                problem = f"the key {key.value!r} occurs twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        self.flatten_mapping(node)
        return [(str(key.value), value) for key, value in node.value]


_ConfigLoader.add_implicit_resolver(  # YAML 1.1 reads 1e-5 as text
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)
