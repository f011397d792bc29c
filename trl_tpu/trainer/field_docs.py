"""The texts of a config's fields, written once: for ``--help`` and for the class's docstring."""

import dataclasses
import inspect
import textwrap
from typing import TypeVar

T = TypeVar("T")


def with_field_docs(cls: type[T]) -> type[T]:
    """Append the ``help`` of a dataclass's own fields to its docstring, as TRL's section of parameters."""
    lines = []
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]  # a dataclass
        if item.name in cls.__annotations__ and "help" in item.metadata:
            kind = inspect.formatannotation(item.type).replace("typing.", "")
            default = item.default is not None and item.default is not dataclasses.MISSING
            lines.append(f"    {item.name} (`{kind}`{f', defaults to `{item.default!r}`' if default else ''}):")
            lines.append(textwrap.fill(item.metadata["help"], 119, initial_indent=" " * 8, subsequent_indent=" " * 8))
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Parameters:", *lines])
    return cls


__all__ = ["with_field_docs"]
