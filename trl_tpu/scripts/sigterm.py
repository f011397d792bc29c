"""What a SIGTERM does to `trl-tpu reward` while it does not train; light, to be there from the first line on.

Until the run's folder is known, it waits. Before training it ends the command with status 75, as in training: nothing
is lost, and the run can be resumed. After training the command finishes, so that its result is complete. A second
SIGTERM kills at any time.
"""

import signal
import sys
import threading
from collections.abc import Callable

UNFINISHED = 75  # as `trl_tpu.training.preemption` has it


class _Heard:
    signal = False
    at_end: Callable[[], None] | None = None  # None where the command is not to end


def listen() -> None:
    """Hear SIGTERM from here on."""
    _Heard.signal, _Heard.at_end = False, None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _hear)


def may_end(at_end: Callable[[], None]) -> None:
    """End the command from here on, and now if a SIGTERM has come.

    Args:
        at_end: What is to be done then, so that the run can be resumed.
    """
    _Heard.at_end = at_end
    if _Heard.signal:
        _end(at_end)


def may_end_no_more() -> None:
    """Leave what comes from here on to training, and then to the end of the command."""
    _Heard.at_end = None


def _hear(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _Heard.signal = True
    if _Heard.at_end is not None:
        _end(_Heard.at_end)


def _end(at_end: Callable[[], None]) -> None:
    at_end()
    print("SIGTERM came before training: go on with --resume_from_checkpoint true.", file=sys.stderr)
    raise SystemExit(UNFINISHED)
