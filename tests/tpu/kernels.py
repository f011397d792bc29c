"""Compiles attention of expanded rows, forward and backward, by one of jax's kernels for one chip of a topology.

Prints how many kernels the program runs. Arguments: the topology, "flash" or "splash", the length of rows.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.sharding import SingleDeviceSharding

from trl_tpu.runtime import splash
from trl_tpu.runtime.placeholder import write_kernels_for_libtpu

ROWS, HEADS, SIZE = 2, 4, 64


def flash(q: Any, k: Any, v: Any, segment: Any) -> Any:
    segments = flash_attention.SegmentIds(segment, segment)
    return flash_attention.flash_attention(q, k, v, segment_ids=segments, causal=True, sm_scale=SIZE**-0.5)


def block_sparse(q: Any, k: Any, v: Any, segment: Any) -> Any:
    return splash._attend(q * SIZE**-0.5, k, v, segment, jnp.ones_like(segment), None, None)


def main() -> None:
    write_kernels_for_libtpu()
    topology, kernel, length = sys.argv[1:]
    attend = {"flash": flash, "splash": block_sparse}[kernel]
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]

    def given(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    def gradients(*tensors: Any) -> Any:
        return jax.grad(lambda q, k, v: attend(q, k, v, tensors[3]).astype(jnp.float32).sum(), (0, 1, 2))(*tensors[:3])

    heads = [given(ROWS, HEADS, int(length), SIZE) for _ in range(3)]
    compiled = jax.jit(gradients).lower(*heads, given(ROWS, int(length), dtype=jnp.int32)).compile()
    print("kernels:", compiled.as_text().count('custom_call_target="tpu_custom_call"'))


if __name__ == "__main__":
    main()
