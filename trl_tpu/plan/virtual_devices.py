"""Virtual devices of torch_xla in the place of a slice's chips. Imports nothing heavy: it comes before torch_xla."""

import os
import re
from collections.abc import Mapping
from typing import Any

from ..parallel.chips import parse_topology


def pretend_devices(values: Mapping[str, Any], words: list[str]) -> None:
    """Let torch_xla have as many virtual devices as the slice has chips: the training's own checks count them.

    They compute nothing. How many there are is settled before torch_xla is imported.

    Args:
        values: Of the command's YAML file.
        words: Of its command line.

    Raises:
        UserError: There is no such slice.
    """
    named = re.findall(r"--topology[= ](\S+)", " ".join(words)) or [values.get("topology")]
    chips = parse_topology(named[-1]).chips if named[-1] else 1  # where none is named, the parser will say so
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(chips), "USE_TORCH_XLA": "1"}
