"""Attention of expanded rows, by the trainer's kernel, is taken by the TPU's compiler."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import apart
import pytest
from chosen import AT_ONCE, chosen

from trl_tpu.plan.compile import WITHOUT_A_TPU


def count_of_kernels(topology: str, rows: int, length: int) -> int:
    words = (str(Path(__file__).with_name("kernels.py")), topology, str(rows), str(length))
    return int(apart.cold(*words, **WITHOUT_A_TPU).splitlines()[-1].removeprefix("kernels: "))


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Mapping[tuple[str, int, int], Future[int]]]:
    asked = chosen(request, "topology", "rows", "length")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {each: pool.submit(count_of_kernels, *each) for each in asked}


@pytest.mark.parametrize(
    ("topology", "rows", "length", "kernels"),
    [
        ("v5e:2x2", 2, 131072, 3),  # which takes longest
        ("v6e:2x2", 2, 2048, 3),
        ("v5e:2x2", 300, 2048, 3),
    ],
)
def test_forward_and_backward_compile(
    topology: str, rows: int, length: int, kernels: int, counts: Mapping[tuple[str, int, int], Future[int]]
) -> None:
    """The backward has three kernels: the forward again, for queries and for keys."""
    assert counts[topology, rows, length].result() == kernels
