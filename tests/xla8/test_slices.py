"""Devices in slices: the mesh must match their number, and `data` spans the slices first.

No machine with several slices is available. Only the attributes of such devices are replaced (slice and coordinates,
as libtpu reports them for v5e), and torch_xla's check for TPUs. The mesh is torch_xla's.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from trl_tpu.runtime.xla import XlaRuntime

Report = Callable[[list[int]], None]


@pytest.fixture
def runtime() -> Any:
    made = XlaRuntime()
    before = xs.get_global_mesh()
    yield made
    xs.set_global_mesh(before)


@pytest.fixture
def report_slices(monkeypatch: pytest.MonkeyPatch) -> Report:
    """Return a function that makes the eight devices report these slices, each a line of devices in order."""

    def report(slices: list[int]) -> None:
        def attributes() -> list[dict[str, Any]]:
            seats = [slices[:device].count(slice_index) for device, slice_index in enumerate(slices)]
            return [
                {"name": f"TPU:{device}", "coords": [seat, 0, 0], "core_on_chip": 0, "slice_index": slices[device]}
                for device, seat in enumerate(seats)
            ]

        monkeypatch.setattr(xr, "global_runtime_device_attributes", attributes)
        monkeypatch.setattr(xm, "xla_device_hw", lambda device: "TPU")

    return report


SIZES = [{"data": 2, "fsdp": 4, "tensor": 1}, {"data": 4, "fsdp": 1, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}]


@pytest.mark.parametrize("sizes", SIZES)
def test_consecutive_slices_keep_the_order(runtime: XlaRuntime, report_slices: Report, sizes: dict[str, int]) -> None:
    """Tests with `slices=2` on virtual devices use the order of torch_xla's mesh of slices."""
    report_slices([0] * 4 + [1] * 4)
    assert runtime.topology().slices == 2
    runtime.set_mesh(sizes, 2)
    assert isinstance(runtime._mesh, xs.HybridMesh)
    assert runtime._mesh.shape() == sizes
    hybrid = np.array(runtime._mesh.device_ids).reshape(tuple(sizes.values()))
    halves = np.split(hybrid, 2, axis=0)
    assert [set(half.flatten().tolist()) for half in halves] == [set(range(4)), set(range(4, 8))]
    assert hybrid.flatten().tolist() == list(range(8))


def test_data_axis_spans_slices_for_any_device_numbering(runtime: XlaRuntime, report_slices: Report) -> None:
    report_slices([0, 1] * 4)
    runtime.set_mesh({"data": 2, "fsdp": 4, "tensor": 1}, 2)
    assert np.array(runtime._mesh.device_ids).reshape(2, 4).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(("reported", "asked"), [([0] * 8, 2), ([0] * 4 + [1] * 4, 1), ([0] * 4 + [1] * 4, 4)])
def test_wrong_slices_are_rejected(runtime: XlaRuntime, report_slices: Report, reported: Any, asked: int) -> None:
    report_slices(reported)
    actual = len(set(reported))
    with pytest.raises(ValueError, match=f"slices={actual}"):
        runtime.set_mesh({"data": 4, "fsdp": 2, "tensor": 1}, asked)


def test_devices_without_slice_information_stand_for_slices(runtime: XlaRuntime) -> None:
    runtime.set_mesh({"data": 2, "fsdp": 4, "tensor": 1}, 2)
    assert not isinstance(runtime._mesh, xs.HybridMesh) and list(runtime._mesh.device_ids) == list(range(8))
