"""A user's errors keep their class and their message, also from another process."""

import pickle

import pytest

from trl_tpu.errors import UserError, UserFileError, UserTypeError


@pytest.mark.parametrize(
    ("kind", "promised"), [(UserError, ValueError), (UserTypeError, TypeError), (UserFileError, FileNotFoundError)]
)
def test_errors_are_what_trl_promises_and_come_back_whole(kind: type[UserError], promised: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind("Row 1: `chosen` is empty.")))
    assert type(error) is kind and str(error) == "Row 1: `chosen` is empty."
    assert isinstance(error, UserError) and isinstance(error, promised)
