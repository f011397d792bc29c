"""Splash attention equals plain attention: jax interprets the TPU's kernel on the CPU, in torch_xla's own program."""

import functools
import importlib.util
from typing import Any

import pytest
import torch

from trl_tpu import runtime
from trl_tpu.modeling.attention.expanded_rows import ExpandedRows
from trl_tpu.runtime.kernels.plain import attend_in_rows

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="kernels in Pallas need jax: pip install 'trl-tpu[tpu]'"
)


def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, whose kernels then run on a CPU."""
    runtime.current()
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    from trl_tpu.runtime.kernels import splash

    make = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", make)
    monkeypatch.setattr(splash, "_PLATFORM", "cpu")
    splash._programs.cache_clear()
    return splash


def two_copies(rows: int, length: int) -> ExpandedRows:
    """Every token twice, beside other tokens in each copy, which see each other; of some, no output is taken."""
    column_L = torch.arange(length, dtype=torch.int32)
    is_first_RL = torch.randint(0, 2, (rows, length)) == 1
    is_taken_RL = torch.ones(rows, length, dtype=torch.bool)
    is_taken_RL[0, : length // 2] = is_taken_RL[1, length // 3 :] = False
    segment_R2L = torch.randint(0, 4, (rows, 2, length), dtype=torch.int32).sort(-1).values
    home_R2L = torch.stack([is_first_RL & is_taken_RL, ~is_first_RL & is_taken_RL], 1)
    return ExpandedRows(
        column_L.expand(rows, 2, length).contiguous(),
        segment_R2L,
        torch.where(home_R2L, column_L, -1),
        torch.where(is_taken_RL, column_L + length * ~is_first_RL, -1).int(),
    )


@pytest.mark.parametrize(
    ("length", "size", "window", "softcap"),
    [
        (512, 128, None, None),
        (200, 64, 7, None),
        (130, 16, 40, 2.0),
        (640, 16, None, None),
        (640, 16, 200, None),
        (640, 80, 200, 2.0),
    ],
)
def test_splash_attention_equals_plain_attention(
    length: int,
    size: int,
    window: int | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs and gradients, with copies, segments, grouped heads, and lengths and heads that are padded.

    640 columns are five blocks, of which those are left out that no segment joins, or whose queries are not needed.
    """
    splash = interpreted(monkeypatch)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, size) for heads in (4, 2, 2))
    weight, rows = torch.randn(2, length, 4, size), two_copies(2, length)

    def outputs_and_gradients(kernel: object, device: str) -> list[torch.Tensor]:
        leaves = [tensor.to(device).requires_grad_() for tensor in (q, k, v)]
        places = ExpandedRows(*(place.to(device) for place in rows))
        output = kernel(*leaves, places, size**-0.5, window, softcap)  # type: ignore[operator]
        return [output, *torch.autograd.grad((output * weight.to(device)).sum(), leaves)]

    found = runtime.current().fetch(outputs_and_gradients(splash.splash_attention, "xla"))
    for ours, theirs in zip(found, outputs_and_gradients(attend_in_rows, "cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # float32 sums in another order


def test_rows_in_groups_equal_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a TPU cannot hold the lists of blocks of all rows: four of them, three and one."""
    splash = interpreted(monkeypatch)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 256, 16).to("xla").requires_grad_() for heads in (4, 2, 2))
    rows = ExpandedRows(*(place.to("xla") for place in two_copies(2, 256)))

    def outputs_and_gradients(most: int) -> list[torch.Tensor]:
        monkeypatch.setattr(splash, "rows_at_once", lambda _: most)
        splash._programs.cache_clear()
        output = splash.splash_attention(q, k, v, rows, 0.25)
        found = [output, *torch.autograd.grad(output.square().sum(), (q, k, v))]
        return runtime.current().fetch(found)

    for grouped, at_once in zip(outputs_and_gradients(3), outputs_and_gradients(4), strict=True):
        torch.testing.assert_close(grouped, at_once, rtol=0, atol=0)  # the same sums in the same order


def test_tokens_are_kept_for_the_backward_and_not_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys, values and outputs, heads of 16 features side by side; and a number for each query of a copy."""
    splash = interpreted(monkeypatch)
    length, size, rows = 256, 16, two_copies(2, 256)
    q, k, v = (torch.randn(2, heads, length, size).to("xla").requires_grad_() for heads in (4, 2, 2))
    kept: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        places = ExpandedRows(*(place.to("xla") for place in rows))
        splash.splash_attention(q, k, v, places, size**-0.5)
    of_tokens = [(2, length, heads * size) for heads in (4, 2, 2, 4)]
    assert kept == [*of_tokens, (2 * 2, 4, length)]


def test_blocks_are_run_where_a_needed_query_sees_a_key_and_nowhere_else() -> None:
    """Dialogues one after the other, then padding, of which none is needed."""
    runtime.current()
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    from trl_tpu.runtime.kernels.splash_blocks import meeting_blocks, with_blocks

    block, length, window = 128, 1024, 300
    ends = np.array([[100, 420, 700, 1024], [384, 385, 900, 900]])
    columns = np.arange(length)
    segment_BL = (ends[:, None] <= columns[:, None]).sum(-1) + 1
    segment_BL[1, 900:] = 0
    needed_BL = (segment_BL != 2) & (segment_BL > 0) & (columns % 512 > 60)
    sees_LL = (columns <= columns[:, None]) & (columns > columns[:, None] - window)
    sees_BLL = needed_BL[:, :, None] & (segment_BL[:, :, None] == segment_BL[:, None]) & sees_LL
    blocks = length // block
    expected_BNN = sees_BLL.reshape(2, blocks, block, blocks, block).any((2, 4))

    mask = splash_attention_mask.LocalMask((length, length), (window - 1, 0), 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask]),
        block_sizes=splash_attention_kernel.BlockSizes(**{f"block_{name}": block for name in names}),
        head_shards=1,
        q_seq_shards=1,
    )
    meets = meeting_blocks(jnp.asarray(segment_BL, jnp.int32), jnp.asarray(needed_BL), block)
    lists = with_blocks(kernel, meets)
    for info, is_turned in ((lists.fwd_mask_info, False), (lists.dq_mask_info, False), (lists.dkv_mask_info, True)):
        others, kinds = (np.asarray(each[0]).T if is_turned else np.asarray(each[0]) for each in info[:3:2])
        found_BNN = np.zeros((2, blocks, blocks), bool)
        for own, place in np.argwhere(kinds > 0):
            row, other = divmod(others[own, place], blocks)
            assert row == own // blocks
            found_BNN[row, own % blocks, other] = True
        np.testing.assert_array_equal(found_BNN.swapaxes(1, 2) if is_turned else found_BNN, expected_BNN)
