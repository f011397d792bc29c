"""What a user can put right: settings, files, data and models that cannot work. The message names rule, value and fix.

The command prints these in one line and ends with status 2; every other exception keeps its traceback. They are made
of one message, so that they come back whole from worker processes.
"""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

#: The exit status of a run that is to be started again to go on: EX_TEMPFAIL of sysexits.h.
UNFINISHED = 75

#: The exit status of a run of which a checkpoint could not be saved: EX_IOERR of sysexits.h.
NOT_SAVED = 74

#: The exit status of a run whose best model could not be loaded at its end: EX_CANTCREAT of sysexits.h.
BEST_LOST = 73


class UserError(ValueError):
    """Something that the user gave cannot work."""


class UserTypeError(UserError, TypeError):
    """As `UserError`, for a value of the wrong type, where TRL's API promises a TypeError."""


class UserFileError(UserError, FileNotFoundError):
    """As `UserError`, for a file, model or dataset that is not where the user says, where TRL raises an OSError."""


class UserKeyError(UserError, KeyError):
    """As `UserError`, for a column or split that is not there, where TRL raises a KeyError."""

    __str__ = Exception.__str__  # a KeyError's text is a repr


@contextmanager
def explaining(
    fault: str, fix: str = "Correct the name, its files or what `model_init_kwargs` says."
) -> Iterator[None]:
    """Raise the errors of libraries, or of a model's own code, as a UserError, of the same kind, after ``fault``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = textwrap.shorten(str(error), 800).rstrip(".")  # some libraries list every model they know
        kind = UserFileError if isinstance(error, OSError) else UserError
        raise kind(f"{fault}: {type(error).__name__}: {reason}. {fix}") from error
