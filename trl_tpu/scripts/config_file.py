"""The YAML file of ``--config``. Imports are light: the command exports the file's ``env`` before heavy imports."""

import argparse
import os
import re
from collections.abc import Iterable
from typing import Any

import yaml

from trl_tpu.errors import explaining


def take_config(args: Iterable[str] | None) -> tuple[dict[str, Any], list[str]]:
    """Take ``--config FILE`` out of a command line, export the file's ``env`` section and return its other values.

    Args:
        args: Command-line arguments, by default ``sys.argv[1:]``; ``--config FILE`` and ``--config=FILE`` both work.

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
    options, rest = parser.parse_known_args(None if args is None else list(args))
    if (path := options.config) is None:
        return {}, rest
    with explaining(f"Config file {path} is not a YAML mapping in UTF-8", "Correct it."):
        with open(path, encoding="utf-8-sig") as file:
            loader = _Loader(file)
        root: Any = loader.get_single_node()
        loader.flatten_mapping(root)  # follows `<<`
        nodes = {key.value: value for key, value in root.value}
        settings = {name: loader.value_of(node) for name, node in nodes.items()}
    if settings.pop("env", None):
        with explaining(f"{path}: `env` field should be a dict in the YAML file.", "Correct it."):
            os.environ.update({key.value: value.value for key, value in nodes["env"].value})
    return settings, rest


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-5 as a number, which YAML 1.1 reads as text, and rejects duplicate keys."""

    def value_of(self, node: Any) -> Any:
        """Return a value as text, also in lists. True, false, null and mappings keep YAML's types."""
        value = self.construct_object(node, deep=True)  # type: ignore[no-untyped-call]
        if isinstance(value, list):
            return [self.value_of(item) for item in node.value]
        is_typed = value is None or isinstance(value, dict) or node.value.lower() in ("true", "false")
        return value if is_typed else node.value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)  # type: ignore[no-untyped-call]
        keys = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in keys[:place] and key.value != "<<":  # PyYAML accepts a duplicate
                problem = f"the key {key.value!r} occurs twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)
