"""Collectives are read from compiled HLO: how many bytes, between which chips, how often a step."""
# ruff: noqa: E501  # lines of HLO are long

import pytest

from trl_tpu.preflight import loops
from trl_tpu.preflight.collectives import collectives_of, largest_buffers
from trl_tpu.preflight.hlo import Instruction, arrays_of, bytes_of, read_computations
from trl_tpu.preflight.loops import turns_of
from trl_tpu.preflight.program import Collective

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def entry(lines: str, before: str = "") -> str:
    body = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    return f"HloModule step\n{ADD}{before}\nENTRY %main (p: f32[8,128]) -> f32[8,128] {{\n{body}\n}}\n"


def test_a_gather_counts_its_result_and_a_reduce_scatter_its_operand() -> None:
    found = collectives_of(
        entry("""
            %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
            %whole = bf16[32,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="dot.1"}
            %part = bf16[2,128]{1,0} reduce-scatter(%p), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
            ROOT %sum = f32[8,128]{1,0} all-reduce(%p), channel_id=3, replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
        """)
    )
    assert found == (
        Collective("all-gather", 32 * 128 * 2, "bf16", (32, 128), ((0, 1, 2, 3),), 1, "dot.1"),
        Collective("reduce-scatter", 8 * 128 * 2, "bf16", (8, 128), ((0, 1, 2, 3), (4, 5, 6, 7))),
        Collective("all-reduce", 8 * 128 * 4, "f32", (8, 128), ((0, 2), (1, 3))),
    )


def test_a_start_and_its_done_are_one() -> None:
    found = collectives_of(
        entry("""
            %p = f32[8,128]{1,0} parameter(0)
            %s = (f32[8,128]{1,0}, f32[32,128]{1,0}) all-gather-start(%p), replica_groups={}, dimensions={0}
            %d = f32[32,128]{1,0} all-gather-done(%s)
            %r = f32[8,128]{1,0} all-reduce-start(%p), replica_groups={{0,1}}, to_apply=%add
            %e = f32[8,128]{1,0} all-reduce-done(%r)
            %c = (f32[8,128]{1,0}, f32[8,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%e), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
            ROOT %f = f32[8,128]{1,0} collective-permute-done(%c)
        """)
    )
    assert [(each.kind, each.shape, each.groups, each.count) for each in found] == [
        ("all-gather", (32, 128), (), 1),
        ("all-reduce", (8, 128), ((0, 1),), 1),
        ("collective-permute", (8, 128), ((0, 1), (2, 3)), 1),
    ]


def test_a_tuple_counts_each_of_its_arrays() -> None:
    found = collectives_of(
        entry("""
            %p = f32[8,128]{1,0} parameter(0)
            ROOT %r = (f32[8,128]{1,0}, /*index=1*/f32[8,128]{1,0}, s32[]) all-reduce(%p, %p, %p), replica_groups={{0,1}}, to_apply=%add
        """)
    )
    assert [(each.dtype, each.bytes, each.count) for each in found] == [("f32", 4096, 2), ("s32", 4, 1)]


FUSED = """
%piece.{0} (q: bf16[2,128]) -> bf16[8,128] {{
  %q = bf16[2,128]{{1,0}} parameter(0)
  ROOT %g.{0} = bf16[8,128]{{1,0}} all-gather(%q), channel_id=7, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, frontend_attributes={{chain_id="{1}"}}
}}
"""


def test_pieces_of_one_chain_inside_fusions_are_one_gather() -> None:
    lines = """
        %p = bf16[2,128]{1,0} parameter(0)
        %f.0 = bf16[8,128]{1,0} fusion(%p), kind=kCustom, calls=%piece.0
        %f.1 = bf16[8,128]{1,0} fusion(%p), kind=kCustom, calls=%piece.1
        ROOT %f.2 = bf16[8,128]{1,0} fusion(%p), kind=kCustom, calls=%piece.2
    """
    one = collectives_of(entry(lines, "".join(FUSED.format(number, 5) for number in range(3))))
    several = collectives_of(entry(lines, "".join(FUSED.format(number, number) for number in range(3))))
    assert [each.count for each in one] == [1]
    assert [each.count for each in several] == [3]


def test_an_all_reduce_of_which_a_part_is_kept_is_a_reduce_scatter() -> None:
    fused = """
%all-reduce-scatter (q: bf16[8,128], i: s32[]) -> bf16[2,128] {
  %q = bf16[8,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %r = bf16[8,128]{1,0} all-reduce(%q), channel_id=7, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %own = bf16[2,128]{1,0} dynamic-slice(%r, %i, %i), dynamic_slice_sizes={2,128}
}
"""
    lines = """
        %p = bf16[8,128]{1,0} parameter(0)
        %i = s32[] constant(0)
        ROOT %f = bf16[2,128]{1,0} fusion(%p, %i), kind=kCustom, calls=%all-reduce-scatter
    """
    assert collectives_of(entry(lines, fused)) == (
        Collective("reduce-scatter", 8 * 128 * 2, "bf16", (8, 128), ((0, 1, 2, 3),)),
    )


LOOP = """
%condition (s: (u32[], f32[8,128], u32[])) -> pred[] {
  %s = (u32[], f32[8,128], u32[]) parameter(0)
  %n = u32[] get-tuple-element(%s), index=0
  %end = u32[] constant(7)
  ROOT %less = pred[] compare(%n, %end), direction=LT
}

%body (t: (u32[], f32[8,128], u32[])) -> (u32[], f32[8,128], u32[]) {
  %t = (u32[], f32[8,128], u32[]) parameter(0)
  %n.1 = u32[] get-tuple-element(%t), index=0
  %x = f32[8,128]{1,0} get-tuple-element(%t), index=1
  %by = u32[] get-tuple-element(%t), index=2
  %y = f32[8,128]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %more = u32[] add(%n.1, %by)
  ROOT %u = (u32[], f32[8,128], u32[]) tuple(%more, %y, %by)
}
"""


def looped(attributes: str) -> str:
    lines = f"""
        %p = f32[8,128]{{1,0}} parameter(0)
        %zero = u32[] constant(1)
        %two = u32[] constant(2)
        %copied = u32[] copy(%zero)
        %in = (u32[], f32[8,128], u32[]) tuple(%copied, %p, %two)
        %w = (u32[], f32[8,128], u32[]) while(%in), condition=%condition, body=%body{attributes}
        ROOT %x.1 = f32[8,128]{{1,0}} get-tuple-element(%w), index=1
    """
    return entry(lines, LOOP)


def test_a_loop_counts_its_turns_written_down_or_counted() -> None:
    """From 1 in steps of 2, which the loop carries along, while below 7: three turns."""
    (counted,) = collectives_of(looped(""))
    (written,) = collectives_of(looped(', backend_config={"known_trip_count":{"n":"12"}}'))
    assert (counted.count, written.count) == (3, 12)
    assert counted.groups == ((0, 1, 2, 3),)


def test_a_loop_that_cannot_be_read_counts_once() -> None:
    text = looped("").replace("%zero = u32[] constant(1)", "%zero = u32[] parameter(1)")
    computations = read_computations(text)
    loop = computations["main"].instructions["w"]
    assert turns_of(loop, computations["main"], computations) is None
    assert [each.count for each in collectives_of(text)] == [1]


def test_what_is_not_known_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fusions that take an unknown number twice, each that of the one before: two ways back at each of sixty."""
    looked_at: list[str] = []

    def counting(values: loops._Values, each: Instruction) -> int:
        looked_at.append(each.name)
        assert len(looked_at) < 1000
        return computed(values, each)

    computed = loops._Values._computed
    monkeypatch.setattr(loops._Values, "_computed", counting)
    both = "%both (a: u32[], b: u32[]) -> u32[] {\n %a = u32[] parameter(0)\n %b = u32[] parameter(1)\n"
    both += " ROOT %c = u32[] add(%a, %b)\n}\n"
    chain = "%u0 = u32[] parameter(1)\n  "
    chain += "".join(f"%u{n + 1} = u32[] fusion(%u{n}, %u{n}), kind=kLoop, calls=%both\n  " for n in range(60))
    text = looped("").replace("%two = u32[] constant(2)", f"{chain}%two = u32[] copy(%u60)").replace(LOOP, LOOP + both)
    assert [each.count for each in collectives_of(text)] == [1]
    assert "u60" in looked_at


WIDE_LOOP = """
%condition (s: (u32[], u32[], f32[8,128])) -> pred[] {
  %s = (u32[], u32[], f32[8,128]) parameter(0)
  %low = u32[] get-tuple-element(%s), index=0
  %high = u32[] get-tuple-element(%s), index=1
  %none = u32[] constant(0)
  %end = u32[] constant(24)
  %same = pred[] compare(%high, %none), direction=EQ
  %below = pred[] compare(%low, %end), direction=LT
  %both = pred[] and(%same, %below)
  %signed = s32[] bitcast-convert(%high)
  %least = s32[] constant(0)
  %negative = pred[] compare(%signed, %least), direction=LT
  ROOT %goes.on = pred[] or(%negative, %both)
}

%carry (l: u32[], h: u32[]) -> u32[] {
  %l = u32[] parameter(0)
  %h = u32[] parameter(1)
  %top = u32[] constant(4294967295)
  %full = pred[] compare(%l, %top), direction=EQ
  %one.2 = u32[] constant(1)
  %more = u32[] add(%h, %one.2)
  ROOT %new = u32[] select(%full, %more, %h)
}

%body (t: (u32[], u32[], f32[8,128])) -> (u32[], u32[], f32[8,128]) {
  %t = (u32[], u32[], f32[8,128]) parameter(0)
  %low.1 = u32[] get-tuple-element(%t), index=0
  %high.1 = u32[] get-tuple-element(%t), index=1
  %x = f32[8,128]{1,0} get-tuple-element(%t), index=2
  %one = u32[] constant(1)
  %low.2 = u32[] add(%low.1, %one)
  %high.2 = u32[] fusion(%low.1, %high.1), kind=kLoop, calls=%carry
  %y = f32[8,128]{1,0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = (u32[], u32[], f32[8,128]) tuple(%low.2, %high.2, %y)
}
"""


@pytest.mark.parametrize(("low", "high", "turns"), [(0, 0, 24), (20, 0, 4), (4294967294, 4294967295, 26), (0, 1, 0)])
def test_a_counter_of_64_bits_in_two_numbers_is_counted(low: int, high: int, turns: int) -> None:
    """As a TPU has it; -2 is the third."""
    lines = f"""
        %p = f32[8,128]{{1,0}} parameter(0)
        %low.0 = u32[] constant({low})
        %high.0 = u32[] constant({high})
        %in = (u32[], u32[], f32[8,128]) tuple(%low.0, %high.0, %p)
        %w = (u32[], u32[], f32[8,128]) while(%in), condition=%condition, body=%body
        ROOT %x.1 = f32[8,128]{{1,0}} get-tuple-element(%w), index=2
    """
    assert sum(each.count for each in collectives_of(entry(lines, WIDE_LOOP))) == turns


def test_sizes_of_types() -> None:
    assert arrays_of("(bf16[2,3]{1,0:T(8,128)(2,1)}, pred[], s4[8]{0})") == [
        ("bf16", (2, 3)),
        ("pred", ()),
        ("s4", (8,)),
    ]
    sizes = {"bf16": 2, "f32": 4, "pred": 1, "f8e4m3fn": 1, "f64": 8, "c64": 8}
    assert {dtype: bytes_of(dtype, (3,)) for dtype in sizes} == {dtype: 3 * size for dtype, size in sizes.items()}
    assert bytes_of("s4", (8,)) == 4


def test_the_largest_buffers_are_those_outside_fusions() -> None:
    fused = """
%inner (q: f32[8,128]) -> f32[8,128] {
  %q = f32[8,128]{1,0} parameter(0)
  %huge = f32[9999,128]{1,0} broadcast(%q), dimensions={}
  ROOT %small = f32[8,128]{1,0} slice(%huge), slice={[0:8]}
}
"""
    lines = """
        %p = f32[8,128]{1,0} parameter(0)
        %f = f32[8,128]{1,0} fusion(%p), kind=kLoop, calls=%inner, metadata={op_name="add.1"}
        ROOT %d = f32[16,128]{1,0} dot(%f, %f), metadata={op_name="dot.2"}
    """
    assert largest_buffers(entry(lines, fused)) == (
        ("f32[16,128] dot dot.2", 16 * 128 * 4),
        ("f32[8,128] fusion add.1", 8 * 128 * 4),
    )
