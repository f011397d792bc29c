"""A sharding plan of the user's own: a YAML file of patterns and mesh axes, read and checked.

For example, for `Llama` over ``fsdp=4,tensor=2``::

    model.embed_tokens.weight: [tensor, fsdp]
    model.layers.*.mlp.down_proj.weight: [fsdp, tensor]
    score.weight: [null, fsdp]
    "*": auto
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..errors import UserError, UserFileError
from .mesh import AXES, MeshShape, names_of

if TYPE_CHECKING:
    from ..runtime import PartitionSpec

AUTO = "auto"


@dataclass(frozen=True)
class Rules:
    """Patterns over parameter names, as in a shell, to the mesh axes of each dimension, or ``"auto"``: as derived.

    The first pattern that matches a name decides.
    """

    source: str
    patterns: "dict[str, PartitionSpec | str]"

    @classmethod
    def read(cls, path: str | Path) -> "Rules":
        """Read a YAML file.

        Raises:
            UserError: It is no YAML, no mapping of patterns to lists of axes, or names an axis that does not exist
                or twice.
            UserFileError: There is no such file.
        """
        source = f"sharding plan {str(path)!r}"
        if not Path(path).is_file():
            raise UserFileError(f"There is no {source}: name a YAML file that maps patterns to mesh axes.")
        try:
            content = yaml.safe_load(Path(path).read_bytes())
        except yaml.YAMLError as error:
            raise UserError(f"{source} is not valid YAML: {' '.join(str(error).split())}.") from error
        if not isinstance(content, dict) or not content:
            raise UserError(f"{source} must map patterns of parameter names to lists of mesh axes, or to {AUTO!r}.")
        return cls(source, {str(pattern): _axes(source, pattern, value) for pattern, value in content.items()})

    def find(self, name: str) -> str | None:
        """Return the pattern that decides for a parameter; None where no pattern matches."""
        return next((pattern for pattern in self.patterns if fnmatchcase(name, pattern)), None)

    def check(self, names: Iterable[str]) -> None:
        """Compare the patterns with all parameters of a model.

        Raises:
            UserError: A pattern decides nothing, or nothing matches a name.
        """
        names = list(names)
        found = {name: self.find(name) for name in names}
        if unmatched := [name for name, pattern in found.items() if pattern is None]:
            raise UserError(
                f"{self.source}: no pattern matches {_some(unmatched)}. Add patterns, or as the last line "
                f"'\"*\": {AUTO}', which leaves the rest to the model's own plan."
            )
        if idle := [pattern for pattern in self.patterns if pattern not in found.values()]:
            raise UserError(
                f"{self.source}: {_some(idle)} match(es) no parameter, or only what earlier patterns match: the first "
                f"decides. Move it up, or take it out. The parameters are, for example, {_some(names)}."
            )

    def fit(self, pattern: str, name: str, shape: tuple[int, ...], mesh: MeshShape) -> "PartitionSpec | None":
        """Return the axes of ``pattern`` for the parameter ``name``, without those of size 1 in the mesh.

        Returns:
            None for a pattern that says ``"auto"``.

        Raises:
            UserError: The shape has another number of dimensions, or a size that the axes do not divide.
        """
        axes = self.patterns[pattern]
        if isinstance(axes, str):
            return None
        where = f"{self.source}: {pattern!r}: [{', '.join(_text(each) for each in axes)}]"
        if len(axes) != len(shape):
            raise UserError(
                f"{where} has {len(axes)} dimension(s), but {name} has the shape {list(shape)}: write an axis, a list "
                "of axes or null for each dimension."
            )
        for size, over in zip(shape, axes, strict=True):
            parts = prod(mesh.sizes[axis] for axis in names_of(over))
            if size % parts:
                raise UserError(
                    f"{where} does not fit {name} of shape {list(shape)} on the mesh '{mesh}': {size} / {parts} is no "
                    "whole number."
                )
        kept = (tuple(axis for axis in names_of(over) if mesh.sizes[axis] > 1) for over in axes)
        return tuple(None if not names else names[0] if len(names) == 1 else names for names in kept)


def _axes(source: str, pattern: Any, value: Any) -> "PartitionSpec | str":
    if value == AUTO:
        return AUTO
    are_listed = isinstance(value, list)
    each_of = [each if isinstance(each, list) else [each] for each in value if each is not None] if are_listed else []
    names = [name for each in each_of for name in each]
    if not are_listed or any(name not in AXES or names.count(name) > 1 for name in names):
        raise UserError(
            f"{source}: {pattern!r}: {value!r} is not {AUTO!r}, nor a list of a mesh axis, a list of axes or null for "
            f"each dimension: the axes are {', '.join(AXES)}, each once."
        )
    return tuple(tuple(each) if isinstance(each, list) else each for each in value)


def _text(axes: str | tuple[str, ...] | None) -> str:
    return "null" if axes is None else axes if isinstance(axes, str) else f"[{', '.join(axes)}]"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
