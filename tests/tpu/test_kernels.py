"""The TPU compiler compiles the trainer's kernel for expanded-row attention."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import subprocesses
from subprocesses import PARALLEL_COMPILES, selected_cases

from trl_tpu.plan.compile import WITHOUT_A_TPU


def count_of_kernels(topology: str, rows: int, length: int) -> int:
    words = (str(Path(__file__).with_name("kernels.py")), topology, str(rows), str(length))
    return int(subprocesses.run_without_server(*words, **WITHOUT_A_TPU).splitlines()[-1].removeprefix("kernels: "))


@pytest.fixture(scope="module")
def kernel_counts(request: pytest.FixtureRequest) -> Iterator[Mapping[tuple[str, int, int], Future[int]]]:
    asked = selected_cases(request, "topology", "rows", "length")
    with ThreadPoolExecutor(PARALLEL_COMPILES) as pool:
        yield {each: pool.submit(count_of_kernels, *each) for each in asked}


@pytest.mark.parametrize(
    ("topology", "rows", "length", "kernels"),
    [
        ("v5e:2x2", 2, 131072, 3),  # takes longest
        ("v6e:2x2", 2, 2048, 3),
        ("v5e:2x2", 300, 2048, 3),
    ],
)
def test_attention_kernels_compile(
    topology: str, rows: int, length: int, kernels: int, kernel_counts: Mapping[tuple[str, int, int], Future[int]]
) -> None:
    """The backward has three kernels: one for the forward, one for queries and one for keys."""
    assert kernel_counts[topology, rows, length].result() == kernels
