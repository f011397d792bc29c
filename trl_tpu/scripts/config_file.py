"""The YAML file that ``--config`` names: read it and export its ``env`` section.

This module imports nothing heavy, so that the command can export ``env`` before transformers and torch_xla are
imported: they read some variables (``USE_TORCH_XLA``, ``XLA_FLAGS``) once, on import.
"""

import math
import os
import re
from collections.abc import Sequence
from itertools import chain
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
    if others := [name for name, value in env.items() if not isinstance(value, str)]:
        raise UserError(
            f"Config file {path}: `env` gives {others[0]} {env[others[0]]!r:.80}, which is no text. Write "
            f"`{others[0]}: ''` for an empty value, or leave it out."
        )
    try:
        os.environ.update({str(name): value for name, value in env.items()})
    except (OSError, ValueError) as error:
        raise UserError(
            f"Config file {path}: `env` has a name or value that no environment can hold ({error}). Correct it."
        ) from error
    return values, rest


def read_config(path: str) -> dict[str, Any]:
    """Read the mapping that a YAML file holds.

    Numbers, yes, no, on and off are text as they are written: the flag that takes a value decides what it means, as
    on a command line. So are those in lists, and all values of ``env``. What is in mappings is read: see `_Reader`.

    Raises:
        UserError: It is not UTF-8, not YAML, not a mapping, or has a key that is not text or is there twice, or
            aliases by which it grows without bounds.
        UserFileError: It is not there or cannot be read.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            values = yaml.load(file, _Reader)  # noqa: S506  # a kind of SafeLoader
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


def read_scalar(text: str) -> Any:
    """Return the number or bool that YAML takes a text for; else the text."""
    reader = _Reader("")
    tag = reader.resolve(yaml.ScalarNode, text, (True, False))
    return reader.construct_object(yaml.ScalarNode(tag, text)) if tag in (_INT, _FLOAT, _BOOL) else text


_INT, _FLOAT, _BOOL, _NULL, _STR, _MERGE = (
    f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null", "str", "merge")
)
_ONLY_IN_1_1 = re.compile(r"[-+]?0[0-7_]+|.*:.*")  # 010 is 8 there, and 12:30 is 750
_NOT_IN_1_1 = re.compile(r"[-+]?[0-9]+[eE][-+][0-9]+")  # 1e-5 is text there
_LARGEST = 1_000_000


class _Reader(yaml.SafeLoader):
    """Reads YAML without its surprises.

    - A key twice in a mapping, which YAML forbids: PyYAML takes the last, and a user who edits the other trains on
      the old.
    - Numbers of YAML 1.1, of which 1.2 has rid itself: those in base 8 and 60 are text here, as dates are, and 1e-5 is
      a number.
    - Aliases of aliases, by which a few lines become gigabytes.
    """

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        tag: str = super().resolve(kind, value, implicit)
        if kind is not yaml.ScalarNode or not implicit[0] or tag in (_BOOL, _NULL, _MERGE):
            return tag
        if tag in (_INT, _FLOAT):
            return _STR if _ONLY_IN_1_1.fullmatch(value) else tag
        return _FLOAT if _NOT_IN_1_1.fullmatch(value) else _STR

    def get_single_node(self) -> yaml.Node | None:
        root: yaml.Node | None = super().get_single_node()
        if root is not None and _size(root, {}) > _LARGEST:
            problem = f"written out, its aliases (*name) make more than {_LARGEST:,} characters"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=root.start_mark)
        if isinstance(root, yaml.MappingNode):
            root.value = [
                (key, _all_text(value) if getattr(key, "value", None) == "env" else _as_written(value))
                for key, value in root.value
            ]
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if (key.tag, key.value) in seen:
                    problem = f"the key {key.value!r} is there twice"
                    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Count a node's values and characters, those behind an alias each time: without end in one that holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _as_written(node: yaml.Node) -> yaml.Node:
    """Make text of a number and of yes, no, on and off, also in a list: what it is, the flag knows that takes it."""
    if isinstance(node, yaml.SequenceNode):
        return yaml.SequenceNode(node.tag, list(map(_as_written, node.value)), node.start_mark, node.end_mark)
    is_text = node.tag in (_INT, _FLOAT) or (node.tag == _BOOL and node.value.lower() not in ("true", "false"))
    return _text(node) if is_text else node


def _all_text(node: yaml.Node) -> yaml.Node:
    """Make text of a mapping's names and values, as an environment holds them; null stays null."""
    if not isinstance(node, yaml.MappingNode):
        return node
    pairs = [tuple(_text(each) if each.tag in (_INT, _FLOAT, _BOOL) else each for each in pair) for pair in node.value]
    return yaml.MappingNode(node.tag, pairs, node.start_mark, node.end_mark)


def _text(node: yaml.Node) -> yaml.Node:
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
