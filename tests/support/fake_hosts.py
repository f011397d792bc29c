"""Hosts for tests: threads of this process that gather values as processes do, and a single process."""

import threading
from typing import Any

from trl_tpu.runtime import Topology
from trl_tpu.runtime.native import Runtime


class AllGather:
    """All-gather between threads: each host gets the values of all hosts."""

    def __init__(self, hosts: int) -> None:
        self.hosts, self._values = hosts, [None] * hosts
        self._barrier = threading.Barrier(hosts, timeout=30)
        self.calls = 0

    def gather(self, index: int, value: Any) -> list[Any]:
        """Pass ``value`` for the host ``index``, and return the values of all hosts."""
        self._values[index] = value
        if self._barrier.wait() == 0:
            self.calls += 1
        values = list(self._values)
        self._barrier.wait()
        return values


class Host(Runtime):
    """A host of a mesh, in a thread; threads that save gather separately from those that train."""

    is_spmd = True

    def __init__(self, index: int, training: AllGather, saving: AllGather | None = None) -> None:
        self.index, self.count, self.is_first_of_host = index, training.hosts, True
        self._training, self._saving = training, saving

    def topology(self) -> Topology:
        return Topology(4, 1, self.index, self.count, "made up")

    def all_gather_object(self, value: Any, while_saving: bool = False) -> list[Any]:
        all_gather = self._saving if while_saving and self._saving else self._training
        return all_gather.gather(self.index, value)


class SingleHost:
    """A single process, with the interface of `HostAgreement`."""

    index, count, is_first_of_host = 0, 1, True

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]
