"""What a SIGTERM does to `trl-tpu reward` while it does not train; light, to be there from the first line on.

Until the run's folder is known, it waits. Before training it ends the command with status 75, as in training: nothing
is lost, and the run can be resumed. After training the command finishes, so that its result is complete. A second
SIGTERM kills at any time.
"""

import signal
import sys
import threading
from collections.abc import Callable

from trl_tpu import forks
from trl_tpu.errors import UNFINISHED


class _State:
    listens = False
    came = False
    at_end: Callable[[], str] | None = None  # None where the command is not to end


def listen() -> None:
    """Handle SIGTERM from here on."""
    forks.end_by_sigterm()
    _State.listens = threading.current_thread() is threading.main_thread()
    _State.came = False
    finish()


def end_command(at_end: Callable[[], str]) -> None:
    """End the command at a SIGTERM from here on, and now if one has come.

    Args:
        at_end: Does what is to be done then, and returns how to resume.
    """
    _State.at_end = at_end
    if _State.came:
        _end()


def stop_listening() -> None:
    """Handle nothing while training does; a second SIGTERM kills there."""
    if _State.listens:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def finish() -> None:
    """Let the command come to its end from here on, whether or not a SIGTERM comes."""
    _State.at_end = None
    if _State.listens:
        signal.signal(signal.SIGTERM, _handle)


def _handle(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _State.came = True
    if _State.at_end is not None:
        _end()


def _end() -> None:
    assert _State.at_end is not None
    print(f"SIGTERM came before training: {_State.at_end()}.", file=sys.stderr)
    raise SystemExit(UNFINISHED)
