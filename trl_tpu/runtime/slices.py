"""The device mesh of torch_xla, over one slice or several."""

import logging
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from ..errors import UserError

logger = logging.getLogger(__name__)


def reported_slices() -> set[Any]:
    """Return the slices that the devices say they are in; virtual devices say nothing."""
    return {each["slice_index"] for each in xr.global_runtime_device_attributes() if "slice_index" in each}


def make_mesh(sizes: Mapping[str, int], slices: int) -> xs.Mesh:
    """Return all devices along named axes, the first of which goes over the slices; see `Runtime.set_mesh`."""
    names, shape = tuple(sizes), tuple(sizes.values())
    reported = reported_slices()
    if reported and len(reported) != slices:
        raise UserError(
            f"The mesh is for {slices} slice(s), but the devices are in {len(reported)}: slices={len(reported)}, or "
            "leave `slices` out, which is read from the devices."
        )
    if len(reported) > 1:
        within = (shape[0] // slices, *shape[1:])
        across = (slices, *(1 for _ in shape[1:]))
        return xs.HybridMesh(ici_mesh_shape=within, dcn_mesh_shape=across, axis_names=names)
    if slices > 1:
        logger.warning(
            f"slices={slices}: the devices do not say in which slices they are, so runs of {prod(shape) // slices} of "
            "them, in their order, stand for slices."
        )
    return xs.Mesh(np.arange(xr.global_runtime_device_count()), shape, names)
