"""Hosts that are threads of this process, which meet as processes do."""

import threading
from typing import Any

from trl_tpu.runtime import Topology
from trl_tpu.runtime.native import Runtime


class Meeting:
    """Where hosts in threads exchange values: each gets what all gave."""

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


class Host(Runtime):
    """A host of a mesh, in a thread; its threads that save meet apart from those that train."""

    is_spmd = True

    def __init__(self, index: int, training: Meeting, saving: Meeting | None = None) -> None:
        self.index, self.count, self.is_first_of_host = index, training.hosts, True
        self._training, self._saving = training, saving

    def topology(self) -> Topology:
        return Topology(4, 1, self.index, self.count, "made up")

    def all_gather_object(self, value: Any, while_saving: bool = False) -> list[Any]:
        meeting = self._saving if while_saving and self._saving else self._training
        return meeting.gather(self.index, value)
