"""Score rows by the command, in windows of a few rows, and be killed when some rows are spelled: the words are how
many rows a window has, after how many rows to be killed (0 for never), and those of the command."""

import os
import signal
import sys
from typing import Any

from trl_tpu import cli
from trl_tpu.scoring import stream
from trl_tpu.scripts import score

if __name__ == "__main__":
    window, at = map(int, sys.argv[1:3])
    stream.WINDOW = window
    spelled, spell = 0, score.json_line

    def json_line(row: dict[str, Any]) -> bytes:
        global spelled
        spelled += 1
        if spelled == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return spell(row)

    score.json_line = json_line
    sys.exit(cli.main(sys.argv[3:]))
