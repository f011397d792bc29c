"""What a SIGTERM does to `trl-tpu reward` while it does not train; light, to be there from the first line on.

Until the run's folder is known, it waits. Before training it ends the command with status 75, as in training: nothing
is lost, and the run can be resumed. After training the command finishes, so that its result is complete. A second
SIGTERM kills at any time.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

from trl_tpu import forks
from trl_tpu.errors import UNFINISHED


class _Heard:
    process = 0  # which listens
    signal = False
    at_end: Callable[[], str] | None = None  # None where the command is not to end


def listen() -> None:
    """Hear SIGTERM from here on."""
    forks.end_by_sigterm()
    _Heard.process, _Heard.signal, _Heard.at_end = os.getpid(), False, None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _hear)


def may_end(at_end: Callable[[], str]) -> None:
    """End the command from here on, and now if a SIGTERM has come.

    Args:
        at_end: Does what is to be done then, and returns how to go on.
    """
    _Heard.at_end = at_end
    if _Heard.signal:
        _end(at_end)


def leave_to_training() -> None:
    """Hear nothing while training does; a second SIGTERM kills there."""
    if _Heard.process == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def finish() -> None:
    """Let the command come to its end from here on, whether or not a SIGTERM comes."""
    _Heard.at_end = None
    if _Heard.process == os.getpid():
        signal.signal(signal.SIGTERM, _hear)


def _hear(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _Heard.signal = True
    if _Heard.at_end is not None:
        _end(_Heard.at_end)


def _end(at_end: Callable[[], str]) -> None:
    print(f"SIGTERM came before training: {at_end()}.", file=sys.stderr)
    raise SystemExit(UNFINISHED)
