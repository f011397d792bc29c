"""The setting `packing`."""

from enum import StrEnum

from ..errors import UserError

_SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}  # as other flags take them


class Packing(StrEnum):
    """Whether batches are to be packed."""

    AUTO = "auto"
    """Where that is exact; else they are padded, with a warning that says why."""
    TRUE = "true"
    """Yes, or training is refused."""
    FALSE = "false"
    """No."""

    @classmethod
    def parse(cls, value: str | bool) -> "Packing":
        """Read what a user writes, in a script or a file.

        Raises:
            UserError: It is neither 'auto' nor a bool.
        """
        word = str(value).lower()
        try:
            return cls(_SWITCHES.get(word, word))
        except ValueError:
            raise UserError(f"packing must be 'auto', true or false, got {value!r}.") from None
