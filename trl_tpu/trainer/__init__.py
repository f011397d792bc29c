"""Public API at TRL's module paths. Names are imported on first use."""

from .. import __all__ as __all__
from .. import _get_public as __getattr__  # noqa: F401
