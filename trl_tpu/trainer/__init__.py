"""The public API, at TRL's own module paths; names are imported when they are first used."""

from .. import __all__ as __all__
from .. import _get_public as __getattr__  # noqa: F401
