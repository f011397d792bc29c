"""What forks of this process do not inherit from it; light, as the command uses it from its first line on."""

import os
import signal
from functools import cache

_PACKAGE = __name__.partition(".")[0]


@cache
def end_by_sigterm() -> None:
    """Let what is forked from here on end by SIGTERM, though this package handles it in this process.

    A pool ends its workers so. One that is about to wait for a task when the signal comes would not run a handler of
    Python's, and the pool would wait for it for ever.
    """
    os.register_at_fork(after_in_child=_leave_sigterm_to_the_system)


def _leave_sigterm_to_the_system() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if str(getattr(handler, "__module__", "")).partition(".")[0] == _PACKAGE:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
