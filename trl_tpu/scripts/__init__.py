"""The main jobs, one a file, and what their command lines share; as in TRL, their names are here too."""

from .. import __getattr__ as __getattr__
