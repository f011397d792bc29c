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
    at_end: Callable[[], str] | None = None  # None until the command can be ended


def listen() -> None:
    """Handle SIGTERM from here on."""
    forks.end_by_sigterm()
    _State.listens, _State.came, _State.at_end = threading.current_thread() is threading.main_thread(), False, None
    _handle_by(_end_or_remember)


def end_command(at_end: Callable[[], str]) -> None:
    """End the command at a SIGTERM from here on, and now if one has come.

    Args:
        at_end: Does what is to be done then, and returns how to resume.
    """
    _State.at_end = at_end
    if _State.came:
        _end_or_remember()


def stop_listening() -> None:
    """Handle nothing while training does; a second SIGTERM kills there."""
    _handle_by(signal.SIG_DFL)


def finish() -> None:
    """Let the command come to its end from here on, whether or not a SIGTERM comes."""
    _handle_by(lambda *_: _handle_by(signal.SIG_DFL))


def _handle_by(handler: Callable[..., None] | signal.Handlers) -> None:
    if _State.listens:
        signal.signal(signal.SIGTERM, handler)


def _end_or_remember(*_: object) -> None:
    _handle_by(signal.SIG_DFL)
    _State.came = _State.at_end is None
    if _State.at_end is not None:
        print(f"SIGTERM came before training: {_State.at_end()}.", file=sys.stderr)
        raise SystemExit(UNFINISHED)
