"""Hosts that are threads of this process, which meet as processes do."""

import threading
from functools import partial
from typing import Any
from unittest.mock import create_autospec

from trl_tpu.runtime import Topology
from trl_tpu.runtime.native import Runtime


class Meeting:
    """Stands for the runtimes of hosts in threads: each gets what all gave."""

    def __init__(self, hosts: int) -> None:
        self.hosts, self._given = hosts, [None] * hosts
        self._barrier = threading.Barrier(hosts, timeout=30)
        self.times = 0

    def gather(self, index: int, value: Any) -> list[Any]:
        """Give ``value`` as the host ``index``; returns what all gave."""
        self._given[index] = value
        if self._barrier.wait() == 0:
            self.times += 1
        given = list(self._given)
        self._barrier.wait()
        return given

    def topology(self, index: int) -> Topology:
        """Return what the host ``index`` is."""
        return Topology(4, 1, index, self.hosts, "made up")

    def of(self, index: int) -> Any:
        """Return what decisions need of a runtime."""
        runtime = create_autospec(Runtime, instance=True)
        runtime.topology.return_value = self.topology(index)
        runtime.all_gather_object.side_effect = partial(self.gather, index)
        return runtime
