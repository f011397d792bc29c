"""What the attention kernel computes, by the plan's count, is what its rule says for every query and key."""

import numpy as np
import pytest

from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.preflight.analytic import ModelShape
from trl_tpu.preflight.attention_blocks import blocks_run, kernel_flops, kernel_unit_flops
from trl_tpu.preflight.case import Case
from trl_tpu.preflight.chips import parse_topology
from trl_tpu.preflight.lengths import PairLengths
from trl_tpu.runtime.kernels.blocks import block_size


@pytest.mark.parametrize(("length", "window"), [(2048, None), (1152, None), (2048, 700), (512, None)])
def test_blocks_are_those_in_which_a_needed_query_sees_a_key(length: int, window: int | None) -> None:
    rng = np.random.default_rng(length)
    tails = rng.integers(1, length // 12, (5, 2))
    prefixes = rng.integers(1, length // 12, 5)
    pairs = PairLengths.of([(prefix, *tail) for prefix, tail in zip(prefixes, tails, strict=True)])
    order = np.argsort(-pairs.sizes_P, kind="stable")
    block, expected = block_size(length), 0
    for half in (0, 1):
        segment_L, needed_L, at = np.zeros(length, int), np.zeros(length, bool), 0
        for number, pair in enumerate(order):
            end = at + prefixes[pair] + tails[pair, half]
            segment_L[at:end] = number + 1
            needed_L[at if half else at + prefixes[pair] : end] = True
            at = end
        column = np.arange(length)
        sees_LL = (segment_L[:, None] == segment_L) & needed_L[:, None] & (column <= column[:, None])
        if window is not None:
            sees_LL &= column > column[:, None] - window
        expected += sees_LL.reshape(length // block, block, -1, block).any((1, 3)).sum()
    assert blocks_run(pairs, 1, length, window) == expected


def test_pairs_go_over_rows_evenly_and_rows_without_pairs_cost_nothing() -> None:
    """Prompts of 1,024 tokens and answers of 512: of 10 blocks up to the diagonal 6 for the second dialogue, and 3 for
    the first, whose prompt is not asked again."""
    assert blocks_run(PairLengths.alike(8, 2048), 8, 2048) == 8 * (6 + 3)
    assert blocks_run(PairLengths.alike(8, 2048), 16, 2048) == 8 * (6 + 3)


@pytest.mark.parametrize(
    ("remat", "length", "products"),
    [("none", 2048, 2 + 7), ("full", 2048, 2 + 2 + 7), ("dots", 2048, 2 + 7), ("full", 32768, 2 + 2 + 7)],
)
def test_a_block_takes_two_products_in_the_forward_and_seven_in_the_backward(
    remat: str, length: int, products: int
) -> None:
    shape = ModelShape((), hidden=512, layers=1, heads=4, head_dims=(128, 128), windows=(None,))
    lengths = PairLengths.alike(1, length)
    case = Case(parse_topology("v5e:1x1"), MeshShape(), shape, {}, 1, 1, length, lengths, remat)
    one = 2 * 4 * block_size(length) ** 2 * 128 * blocks_run(lengths, 1, length)
    assert kernel_flops(case) == kernel_unit_flops(case) == products * one


def test_heads_of_half_a_vector_fill_half_of_the_units() -> None:
    shape = ModelShape((), hidden=128, layers=1, heads=2, head_dims=(64, 64), windows=(None,))
    case = Case(parse_topology("v5e:1x1"), MeshShape(), shape, {}, 1, 1, 512, PairLengths.alike(1, 512))
    assert kernel_unit_flops(case) == 2 * kernel_flops(case) > 0
