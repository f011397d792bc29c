"""Compiles attention of expanded rows, forward and backward, by one of jax's kernels for one chip of a topology.

Prints how many kernels the program runs. Arguments: the topology, "flash" or "splash", how many rows, their length.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.sharding import SingleDeviceSharding

from trl_tpu.runtime.kernels import splash
from trl_tpu.runtime.placeholder import write_kernels_for_libtpu

HEADS, SIZE = 4, 64


def flash(q: Any, k: Any, v: Any, segment: Any) -> Any:
    """The gradients of the sum of attention's outputs, by jax's kernel."""
    segments = flash_attention.SegmentIds(segment, segment)

    def total(q: Any, k: Any, v: Any) -> Any:
        output = flash_attention.flash_attention(q, k, v, segment_ids=segments, causal=True, sm_scale=SIZE**-0.5)
        return output.astype(jnp.float32).sum()

    return jax.grad(total, (0, 1, 2))(q, k, v)


def block_sparse(*given: Any) -> Any:
    """The same by the trainer's."""
    given = (*given, jnp.ones_like(given[-1]))
    forward, backward = splash.attention_functions(SIZE**-0.5, None, None, given[0].shape)
    output, logsumexp = forward(*given)
    return backward(output, jnp.ones_like(output), logsumexp, *given)


def main() -> None:
    write_kernels_for_libtpu()
    topology, kernel = sys.argv[1:3]
    rows, length = map(int, sys.argv[3:])
    gradients = {"flash": flash, "splash": block_sparse}[kernel]
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]

    def given(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    heads = [given(rows, HEADS, length, SIZE) for _ in range(3)]
    compiled = jax.jit(gradients).lower(*heads, given(rows, length, dtype=jnp.int32)).compile()
    print("kernels:", compiled.as_text().count('custom_call_target="tpu_custom_call"'))


if __name__ == "__main__":
    main()
