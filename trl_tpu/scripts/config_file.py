"""The YAML file of ``--config``. Light: the command reads it, and exports its ``env``, before anything heavy comes."""

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
        The file's values without ``env`` (empty without ``--config``), and the words without ``--config``. Numbers and
        yes, no, on and off are text as they are written, and so are all values of ``env``: the flag that takes a value
        decides what it means, as on a command line. What is in mappings is read as YAML reads it.

    Raises:
        UserError: A file that is not a YAML mapping in UTF-8 with each key once, or an ``env`` that no environment can
            hold.
        UserFileError: The file is not there or cannot be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    found, rest = parser.parse_known_args(args)
    if (path := found.config) is None:
        return {}, rest
    try:
        with open(path, encoding="utf-8-sig") as file:
            values = yaml.load(file, _Reader)  # noqa: S506  # a kind of SafeLoader
    except OSError as error:
        raise UserFileError(f"Config file {path} cannot be read: {error.strerror}. Correct the path.") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, a date such as 2001-13-45
        raise UserError(f"Config file {path} is not YAML in UTF-8: {' '.join(str(error).split())}.") from error
    if not isinstance(values, dict):
        raise UserError(f"Config file {path} is not a YAML mapping, `name: value`.")
    try:
        os.environ.update(values.pop("env", None) or {})
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{path}: `env` field should be a dict in the YAML file. ({error})") from error
    return values, rest


class _Reader(yaml.SafeLoader):
    """Reads YAML, keeps scalars outside mappings as they are written, and rejects a key twice."""

    def construct_document(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.MappingNode):
            return super().construct_document(node)
        read: dict[str, Any] = {}
        for name, value in self.pairs(node):
            is_env = name == "env" and isinstance(value, yaml.MappingNode)
            read[name] = {key: text.value for key, text in self.pairs(value)} if is_env else self.as_written(value)
        return read

    def as_written(self, node: yaml.Node) -> Any:
        """Return the text of a scalar or of those in a list, but true, false, null and mappings as YAML reads them."""
        kind = node.tag.rpartition(":")[2]
        if kind == "seq":
            return [self.as_written(each) for each in node.value]
        is_switch = kind == "bool" and node.value.lower() in ("true", "false")
        is_word = kind in ("bool", "int", "float", "timestamp") and not is_switch
        return node.value if is_word else self.construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.pairs(node)
        return super().construct_mapping(node, deep)

    def pairs(self, node: yaml.MappingNode) -> list[tuple[str, Any]]:
        """Return names and values, those merged by `<<` too; reject a key twice: PyYAML takes the last."""
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for place, key in enumerate(keys):
            if key.value in [earlier.value for earlier in keys[:place]]:
                problem = f"the key {key.value!r} is there twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        self.flatten_mapping(node)
        return [(str(key.value), value) for key, value in node.value]


_Reader.add_implicit_resolver(  # YAML 1.1 takes 1e-5 for text
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)
