"""How long something may take, as users write it."""

import re
from datetime import timedelta

from ..errors import UserError

_DURATION = re.compile(r"(?:([1-9][0-9]{0,5})d)?(?:([1-9][0-9]{0,5})h)?(?:([1-9][0-9]{0,5})m)?")


def parse_duration(text: object, setting: str) -> timedelta:
    """Return a duration such as "2h30m", "1d" or "90m", the value of ``setting``.

    Raises:
        UserError: Any other spelling.
    """
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if not match or not match[0]:
        raise UserError(
            f"{setting}: {text!r} is no duration: write whole numbers of days, hours and minutes with d, h and m, in "
            "this order and without spaces, and leave out what is 0: '2h30m', '1d', '90m'."
        )
    days, hours, minutes = (int(part or 0) for part in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes)
