"""The texts of a config's fields, written once: in the class's docstring, from which ``--help`` takes them."""

import dataclasses
import inspect
import re
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")


def help_from_docstring(cls: type[T]) -> type[T]:
    """Give each of a dataclass's own fields, as its ``help``, what the docstring's list of parameters says of it."""
    described = inspect.cleandoc(cls.__doc__ or "")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # a dataclass
        found = re.search(rf"^ {{4}}{field.name}(?: \(.*\))?:(.*(?:\n {{8}}.*)*)", described, re.MULTILINE)
        if found and field.name in cls.__annotations__:
            text = " ".join(found[1].split()).replace("%", "%%")  # argparse formats it
            field.metadata = MappingProxyType({**field.metadata, "help": text})
    return cls
