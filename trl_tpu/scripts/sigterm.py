"""What a SIGTERM does to `trl-tpu reward` while it does not train; light, to be there from the first line on.

Until the run's folder is known, it waits. Before training it ends the command with status 75, as in training: nothing
is lost, and the run can be resumed. After training the command finishes, so that its result is complete. A second
SIGTERM kills at any time.
"""

import signal
import sys
import threading

UNFINISHED = 75  # as `trl_tpu.training.preemption` has it


class _Heard:
    signal = False
    ends = False


def listen() -> None:
    """Hear SIGTERM from here on."""
    _Heard.signal = _Heard.ends = False
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _hear)


def may_end() -> None:
    """End the command from here on, and now if a SIGTERM has come."""
    _Heard.ends = True
    if _Heard.signal:
        _end()


def may_end_no_more() -> None:
    """Leave what comes from here on to training, and then to the end of the command."""
    _Heard.ends = False


def _hear(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _Heard.signal = True
    if _Heard.ends:
        _end()


def _end() -> None:
    print("SIGTERM came before training: go on with --resume_from_checkpoint true.", file=sys.stderr)
    raise SystemExit(UNFINISHED)
