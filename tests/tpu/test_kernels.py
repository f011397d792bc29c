"""The TPU compiler compiles the trainer's kernel for expanded-row attention."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from subprocesses import PARALLEL_COMPILES, selected_cases

from trl_tpu.plan.compile import call_in_child

HEADS, SIZE = 4, 64


def gradients(*given: Any) -> Any:
    """Return the gradients of queries, keys and values for output gradients of 1."""
    import jax.numpy as jnp

    from trl_tpu.runtime import splash

    forward, backward = splash.attention_functions(SIZE**-0.5, None, None, given[0].shape)
    return backward(jnp.ones_like(forward(*given)[0]), *given)


def count_of_kernels(topology: str, rows: int, length: int) -> int:
    """Compile forward and backward for one chip of a topology, and return the number of kernels in the program."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from trl_tpu.plan.placeholder import write_kernels_for_libtpu

    write_kernels_for_libtpu()
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]

    def given(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    heads = [given(rows, HEADS, length, SIZE) for _ in range(3)]
    compiled = jax.jit(gradients).lower(*heads, given(rows, length, dtype=jnp.int32)).compile()
    return compiled.as_text().count('custom_call_target="tpu_custom_call"')


@pytest.fixture(scope="module")
def kernel_counts(request: pytest.FixtureRequest) -> Iterator[Mapping[tuple[str, int, int], Future[int]]]:
    cases = selected_cases(request, "topology", "rows", "length")
    with ThreadPoolExecutor(PARALLEL_COMPILES) as pool:
        yield {case: pool.submit(call_in_child, count_of_kernels, *case, environment={}) for case in cases}


@pytest.mark.parametrize(
    ("topology", "rows", "length"),
    [("v5e:2x2", 2, 131072), ("v6e:2x2", 2, 2048), ("v5e:2x2", 300, 2048)],  # the first takes longest
)
def test_attention_kernels_compile(
    topology: str, rows: int, length: int, kernel_counts: Mapping[tuple[str, int, int], Future[int]]
) -> None:
    """The backward has three kernels: one for the forward, one for queries and one for keys."""
    assert kernel_counts[topology, rows, length].result() == 3
