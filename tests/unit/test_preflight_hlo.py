"""What a program sends and moves is read from its HLO: every figure here is worked out by hand."""
# ruff: noqa: E501  # lines of HLO are long

import numpy as np
import pytest

from trl_tpu.plan.hlo import axes_of, bytes_moved, groups_of, largest_buffers, read_visits, received

MESH = {"data": 1, "fsdp": 4, "tensor": 2}
FSDP = "replica_groups={{0,2,4,6},{1,3,5,7}}"
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def module(lines: str, before: str = "") -> str:
    return f"HloModule step\n{ADD}{before}\nENTRY %main (p: f32[8,128]) -> f32[8,128] {{\n{indented(lines)}\n}}\n"


def computation(name: str, lines: str) -> str:
    return f"%{name} (p: f32[8]) -> f32[8] {{\n{indented(lines)}\n}}\n"


def indented(lines: str) -> str:
    return "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())


def sent(hlo: str) -> dict[str, dict[str, float]]:
    return received(read_visits(hlo), MESH)


def moved(lines: str, before: str = "") -> float:
    return bytes_moved(read_visits(module(lines, before)))


# ---- between chips


def test_a_chip_receives_all_but_its_own_part_and_sums_twice() -> None:
    lines = f"""
        %p = bf16[8,128]{{1,0:T(8,128)(2,1)}} parameter(0)
        %whole = bf16[32,128]{{1,0:T(8,128)(2,1)S(1)}} all-gather(%p), channel_id=1, {FSDP}, dimensions={{0}}
        %part = bf16[2,128]{{1,0}} reduce-scatter(%p), channel_id=2, {FSDP}, dimensions={{0}}, to_apply=%add
        %there = f32[8,128]{{1,0}} all-to-all(%p), channel_id=3, {FSDP}, dimensions={{0}}
        ROOT %sum = f32[8,128]{{1,0}} all-reduce(%p), channel_id=4, replica_groups=[4,2]<=[8], to_apply=%add
    """
    whole, part, there = 32 * 128 * 2 * 3 / 4, 2 * 128 * 2 * 3, 8 * 128 * 4 * 3 / 4
    assert sent(module(lines)) == {
        "fsdp": {"all-gather bf16[32,128]": whole, "reduce-scatter bf16[2,128]": part, "all-to-all f32[8,128]": there},
        "tensor": {"all-reduce f32[8,128]": 2 * 8 * 128 * 4 / 2},
    }


def test_a_start_and_its_done_are_one_and_tuples_count_each_of_their_arrays() -> None:
    lines = """
        %p = f32[8,128]{1,0} parameter(0)
        %s = (f32[8,128]{1,0}, f32[64,128]{1,0}) all-gather-start(%p), replica_groups={}, dimensions={0}
        %d = f32[64,128]{1,0} all-gather-done(%s)
        %r = (f32[8,128]{1,0}, /*index=1*/bf16[8,128]{1,0}) all-reduce-start(%p, %p), replica_groups=[1,8]<=[8], to_apply=%add
        %e = (f32[8,128]{1,0}, bf16[8,128]{1,0}) all-reduce-done(%r)
        %c = (f32[8,128]{1,0}, f32[8,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%e), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
        ROOT %f = f32[8,128]{1,0} collective-permute-done(%c)
    """
    one = 8 * 128 * 4
    assert sent(module(lines)) == {
        "fsdp+tensor": {
            "all-gather f32[64,128]": 8 * one * 7 / 8,
            "all-reduce f32[8,128]": 2 * one * 7 / 8,
            "all-reduce bf16[8,128]": one * 7 / 8,
        },
        "tensor": {"collective-permute f32[8,128]": one},
    }


@pytest.mark.parametrize(("chains", "gathers"), [((5, 5, 5), 1), ((0, 1, 2), 3)])
def test_pieces_of_one_chain_inside_fusions_are_one_gather(chains: tuple[int, ...], gathers: int) -> None:
    pieces = "".join(
        computation(
            f"piece.{number}",
            f'%q = bf16[2,128] parameter(0)\nROOT %g = bf16[8,128] all-gather(%q), channel_id=7, {FSDP}, dimensions={{0}}, frontend_attributes={{chain_id="{chain}"}}',
        )
        for number, chain in enumerate(chains)
    )
    calls = "\n".join(
        f"%f.{number} = bf16[8,128] fusion(%p), kind=kCustom, calls=%piece.{number}" for number in range(3)
    )
    assert sent(module(f"%p = bf16[2,128] parameter(0)\n{calls}", pieces)) == {
        "fsdp": {"all-gather bf16[8,128]": gathers * 8 * 128 * 2 * 3 / 4}
    }


def test_a_sum_of_which_a_chip_keeps_its_part_is_a_reduce_scatter() -> None:
    """By libtpu's name of such a fusion, which may scatter several arrays."""
    fused = computation(
        "all-reduce-scatter.7.clone",
        f"""
        %q = bf16[8,128] parameter(0)
        %r = (bf16[8,128], bf16[16,128]) all-reduce(%q, %q), channel_id=7, {FSDP}, to_apply=%add
        ROOT %own = bf16[2,128] dynamic-slice(%r), dynamic_slice_sizes={{2,128}}
        """,
    )
    lines = "%p = bf16[8,128] parameter(0)\nROOT %f = bf16[2,128] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.7.clone"
    assert sent(module(lines, fused)) == {
        "fsdp": {f"reduce-scatter bf16[{size},128]": size * 128 * 2 * 3 / 4 for size in (8, 16)}
    }


def test_one_chip_alone_sends_nothing() -> None:
    alone = "ROOT %r = f32[8] all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add"
    assert sent(module(f"%p = f32[8] parameter(0)\n{alone}")) == {}


def test_groups_are_read_from_either_spelling() -> None:
    assert groups_of("replica_groups=[2,4]<=[4,2]T(1,0)", 8).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups_of(FSDP, 8).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups_of("replica_groups={}", 4).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ([(0, 1), (2, 3), (4, 5), (6, 7)], "tensor"),
        ([(0, 2), (1, 3), (4, 6), (5, 7)], "fsdp"),
        ([(0, 4), (1, 5), (2, 6), (3, 7)], "data"),
        ([(0, 1, 2, 3), (4, 5, 6, 7)], "fsdp+tensor"),
        ([(0, 2, 4, 6), (1, 3, 5, 7)], "data+fsdp"),
        ([(0, 1, 2, 3, 4, 5, 6, 7)], "data+fsdp+tensor"),
        ([(0,), (1,)], ""),
    ],
)
def test_groups_of_devices_are_the_axes_along_which_they_differ(groups: list[tuple[int, ...]], axes: str) -> None:
    assert axes_of(np.array(groups), {"data": 2, "fsdp": 2, "tensor": 2}) == axes


# ---- loops


def looped(attributes: str = "") -> str:
    """A loop as a TPU has it: its counter has 64 bits, in two numbers."""
    condition = computation(
        "condition",
        """
        %low = u32[] get-tuple-element(%s), index=0
        %high = u32[] get-tuple-element(%s), index=1
        %none = u32[] constant(0)
        %end = u32[] constant(24)
        %same = pred[] compare(%high, %none), direction=EQ
        %below = pred[] compare(%low, %end), direction=LT
        ROOT %goes.on = pred[] and(%same, %below)
        """,
    )
    inner = computation("inner", f"ROOT %g = bf16[8,128] all-gather(%q), {FSDP}, dimensions={{0}}")
    body = computation(
        "body",
        """
        %x = f32[8,128]{1,0} get-tuple-element(%t), index=2
        %y = bf16[8,128]{1,0:S(1)} fusion(%x), kind=kCustom, calls=%inner
        %stack = f32[24,8,128]{2,1,0} fusion(%all, %x), kind=kLoop, calls=%other
        %z = f32[8,128]{1,0} fusion(%x), kind=kLoop, calls=%other
        ROOT %out = (u32[], u32[], f32[8,128]) tuple(%low, %high, %z)
        """,
    )
    other = computation("other", "ROOT %huge = f32[9999,128] broadcast(%q), dimensions={}")
    lines = f"%w = (u32[], u32[], f32[8,128]) while(%in), condition=%condition, body=%body{attributes}"
    return module(lines, condition + inner + other + body)


@pytest.mark.parametrize(("attributes", "turns"), [("", 24), (', backend_config={"known_trip_count":{"n":"12"}}', 12)])
def test_a_loop_counts_its_turns_as_written_down_or_compared_with(attributes: str, turns: int) -> None:
    assert sent(looped(attributes)) == {"fsdp": {"all-gather bf16[8,128]": turns * 8 * 128 * 2 * 3 / 4}}


def test_a_loop_whose_counter_goes_by_two_turns_half_as_often() -> None:
    """As libtpu's loops of products and permutes do, which do two steps a turn."""
    condition = computation(
        "condition",
        """
        %end = u32[]{:T(128)} constant(8)
        %counter = u32[]{:T(128)} get-tuple-element(%s), index=1
        ROOT %below = pred[] compare(%counter, %end), direction=LT
        """,
    )
    body = computation(
        "body",
        """
        %mask = u32[]{:T(128)} constant(15)
        %two = u32[]{:T(128)} constant(2)
        %before = u32[]{:T(128)} get-tuple-element(%t), index=1
        %after = u32[]{:T(128)} add(%before, %two)
        %sent = bf16[8,128]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
        ROOT %out = (bf16[8,128]{1,0}, /*index=1*/u32[]{:T(128)}) tuple(%sent, /*index=1*/%after)
        """,
    )
    loop = "%w = (bf16[8,128]{1,0}, u32[]{:T(128)}) while(%in), condition=%condition, body=%body"
    assert sent(module(loop, condition + body)) == {"tensor": {"collective-permute bf16[8,128]": 4 * 8 * 128 * 2}}


def test_of_a_stack_of_all_layers_each_turn_writes_its_own() -> None:
    one = 8 * 128 * 4
    assert bytes_moved(read_visits(looped())) == 24 * (2 * one + 2 * one)


# ---- to and from memory


def test_what_is_made_is_written_and_read_and_what_stays_on_the_chip_is_not() -> None:
    lines = """
        %a = f32[1024,256]{1,0:T(8,128)} parameter(0)
        %near = f32[1024,256]{1,0:T(8,128)S(1)} add(%a, %a)
        %b = bf16[1024,256]{1,0:T(8,128)(2,1)} convert(%near)
        %view = bf16[256,1024]{1,0} bitcast(%b)
        %two = (bf16[256,1024]{1,0}, f32[1024,256]{1,0:S(1)}) tuple(%view, %near)
        ROOT %c = (f32[4]{0}, f32[8]{0:T(128)S(1)}) custom-call(%view), custom_call_target="TopK"
    """
    assert moved(lines) == 2 * 2 * 1024 * 256 + 2 * 4 * 4


@pytest.mark.parametrize(("place", "times"), [("", 2), ("S(1)", 1)])
def test_a_copy_that_begins_and_ends_is_one_and_to_the_chip_it_is_only_read(place: str, times: int) -> None:
    lines = f"""
        %a = f32[64,128]{{1,0}} parameter(0)
        %s = ((f32[64,128]{{1,0}}), f32[8,128]{{1,0:T(8,128){place}}}, s32[]) slice-start(%a), slice={{[0:8], [0:128]}}
        ROOT %d = f32[8,128]{{1,0:T(8,128){place}}} slice-done(%s)
    """
    assert moved(lines) == times * 4 * 8 * 128


def test_the_largest_buffers_are_those_in_memory_by_what_makes_them() -> None:
    lines = """
        %a = f32[1024,256]{1,0:T(8,128)} parameter(0)
        %near = f32[1024,256]{1,0:T(8,128)S(1)} add(%a, %a)
        %b = bf16[1024,256]{1,0} convert(%near), metadata={op_name="layer.3"}
        ROOT %c = f32[4]{0} custom-call(%b), custom_call_target="TopK"
    """
    assert largest_buffers(read_visits(module(lines))) == (
        ("bf16[1024,256] convert layer.3", 2 * 1024 * 256),
        ("f32[4] custom-call", 16),
    )
    assert len(largest_buffers(read_visits(module(lines)), 1)) == 1
