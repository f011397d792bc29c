"""Errors that users can fix: settings, files, data and models that cannot work. Messages name rule, value and fix.

The command prints these errors in one line and exits with status 2; all other exceptions keep their traceback. Each
error takes a single message, so that it survives pickling by worker processes.
"""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

#: Exit status of an unfinished run; starting it again resumes it. EX_TEMPFAIL in sysexits.h.
UNFINISHED = 75

#: Exit status of a run that could not save its model or a checkpoint. EX_IOERR in sysexits.h.
NOT_SAVED = 74

#: Exit status of a run that could not load its best model at the end. EX_CANTCREAT in sysexits.h.
BEST_LOST = 73


class UserError(ValueError):
    """Settings, files, data or a model from the user cannot work."""


class UserTypeError(UserError, TypeError):
    """A `UserError` for a value of the wrong type; also a TypeError, as in TRL's API."""


class UserFileError(UserError, FileNotFoundError):
    """A `UserError` for a missing file, model or dataset; also an OSError, as in TRL."""


class UserAttributeError(UserError, AttributeError):
    """A `UserError` for a missing attribute; also an AttributeError, so that `hasattr` returns False."""


class UserKeyError(UserError, KeyError):
    """A `UserError` for a missing column or split; also a KeyError, as in TRL."""

    __str__ = Exception.__str__  # KeyError prints the repr of its message


@contextmanager
def explaining(fault: str, fix: str = "Correct the name, its files or `model_init_kwargs`.") -> Iterator[None]:
    """Re-raise errors of libraries and model code as UserError (OSError as UserFileError), starting with ``fault``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = f"{error} {error.__cause__ or ''}"  # datasets names a fault in the cause only
        reason = textwrap.shorten(said, 800).rstrip(".")  # some libraries list all models they support
        kind = UserFileError if isinstance(error, OSError) else UserError
        raise kind(f"{fault}: {type(error).__name__}: {reason}. {fix}") from error
