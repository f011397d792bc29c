"""Compile expanded-row attention with the trainer's kernel, forward and backward, for one chip of a topology.

Prints the number of kernels in the program. Arguments: topology, number of rows, row length.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from trl_tpu.plan.placeholder import write_kernels_for_libtpu
from trl_tpu.runtime import splash

HEADS, SIZE = 4, 64


def gradients(*given: Any) -> Any:
    """Return the gradients of queries, keys and values for output gradients of 1."""
    forward, backward = splash.attention_functions(SIZE**-0.5, None, None, given[0].shape)
    return backward(jnp.ones_like(forward(*given)[0]), *given)


def main() -> None:
    write_kernels_for_libtpu()
    topology, (rows, length) = sys.argv[1], map(int, sys.argv[2:])
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]

    def given(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    heads = [given(rows, HEADS, length, SIZE) for _ in range(3)]
    compiled = jax.jit(gradients).lower(*heads, given(rows, length, dtype=jnp.int32)).compile()
    print("kernels:", compiled.as_text().count('custom_call_target="tpu_custom_call"'))


if __name__ == "__main__":
    main()
