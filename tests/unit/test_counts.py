"""What a chip computes and moves is read from compiled HLO: every figure here is worked out by hand."""
# ruff: noqa: E501  # lines of HLO are long

import pytest

from trl_tpu.preflight.counts import flops_of, memory_traffic


def module(entry: str, before: str = "") -> str:
    return f"HloModule step\n{before}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{lines(entry)}\n}}\n"


def computation(name: str, body: str) -> str:
    return f"%{name} (p: f32[8]) -> f32[8] {{\n{lines(body)}\n}}\n"


def lines(text: str) -> str:
    return "\n".join(f"  {line.strip()}" for line in text.strip().splitlines())


PRODUCT = """
    %a = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(0)
    %b = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(1)
    ROOT %c = f32[16,32]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf
"""
LOOP = computation(
    "body",
    """
    %t = (s32[], bf16[16,8], bf16[8,32]) parameter(0)
    %i = s32[] get-tuple-element(%t), index=0
    %x = bf16[16,8]{1,0} get-tuple-element(%t), index=1
    %y = bf16[8,32]{1,0} get-tuple-element(%t), index=2
    %z = f32[16,32]{1,0} fusion(%x, %y), kind=kOutput, calls=%product
    %one = s32[] constant(1)
    %j = s32[] add(%i, %one)
    ROOT %n = (s32[], bf16[16,8], bf16[8,32]) tuple(%j, %x, %y)
    """,
) + computation(
    "condition",
    """
    %s = (s32[], bf16[16,8], bf16[8,32]) parameter(0)
    %k = s32[] get-tuple-element(%s), index=0
    %end = s32[] constant(24)
    ROOT %goes = pred[] compare(%k, %end), direction=LT
    """,
)


def test_a_product_takes_two_operations_for_each_multiplication() -> None:
    assert flops_of(module(PRODUCT)) == 2 * 16 * 8 * 32


@pytest.mark.parametrize(
    ("left", "right", "result", "how", "multiplications"),
    [
        # every one of 14 rows with every one of 14 places of the window, once, the others lie on padding
        ("4,16,14", "14,32,16", "4,27,32", "window={size=14 pad=13_13 rhs_reversal=1}, dim_labels=bf0_0oi->b0f", 4 * 16 * 32 * 14 * 14),
        # summed over the window's dimension too
        ("4,14,16", "32,14,16", "4,32,1", "window={size=14}, dim_labels=b0f_o0i->bf0", 4 * 16 * 32 * 14),
        # heads as a batch: of the spread-out input each place of the window meets its own
        ("6,16,4", "4,16,32", "6,4,32", "window={size=4 stride=3 lhs_dilate=4}, dim_labels=bf0_0io->b0f", 6 * 16 * 32 * 4),
        # two dimensions at once
        ("2,4,8,3", "3,32,4,8", "2,5,32,1", "window={size=3x4 pad=2_2x0_0 rhs_reversal=1x0}, dim_labels=b1f0_0o1i->b0f1", 2 * 8 * 32 * 9 * 4),
    ],
)  # fmt: skip
def test_windows_count_where_they_lie_on_numbers(
    left: str, right: str, result: str, how: str, multiplications: int
) -> None:
    text = f"%a = bf16[{left}] parameter(0)\n%b = bf16[{right}] parameter(1)\n"
    made = f"ROOT %c = bf16[{result}] convolution(%a, %b), {how}"
    assert flops_of(module(text + made)) == 2 * multiplications


def test_a_dot_counts_what_it_sums_over() -> None:
    text = """
        %a = f32[3,16,8] parameter(0)
        %b = f32[3,8,32] parameter(1)
        ROOT %c = f32[3,16,32] dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
    """
    assert flops_of(module(text)) == 2 * 3 * 16 * 8 * 32


def test_a_loop_counts_as_often_as_it_turns_and_so_does_what_it_moves() -> None:
    entry = """
        %a = bf16[16,8]{1,0} parameter(0)
        %b = bf16[8,32]{1,0} parameter(1)
        %zero = s32[] constant(0)
        %start = (s32[], bf16[16,8], bf16[8,32]) tuple(%zero, %a, %b)
        ROOT %w = (s32[], bf16[16,8], bf16[8,32]) while(%start), condition=%condition, body=%body
    """
    text = module(entry, computation("product", PRODUCT) + LOOP)
    assert flops_of(text) == 24 * 2 * 16 * 8 * 32
    counter, compared = 4 + 4, 4 + 1  # read and written
    assert memory_traffic(text) == 24 * (2 * 16 * 8 + 2 * 8 * 32 + 4 * 16 * 32 + counter) + 25 * compared - compared


def test_every_array_is_read_and_written_once_but_what_stays_on_the_chip() -> None:
    text = """
        %a = f32[1024,256]{1,0:T(8,128)} parameter(0)
        %near = f32[1024,256]{1,0:T(8,128)S(1)} copy(%a)
        %b = bf16[1024,256]{1,0:T(8,128)(2,1)} convert(%near)
        %view = bf16[256,1024]{1,0} bitcast(%b)
        %two = (bf16[256,1024]{1,0}, f32[1024,256]{1,0:S(1)}) tuple(%view, %near)
        ROOT %c = (f32[4]{0}, f32[8]{0:T(128)S(1)}) custom-call(%view), custom_call_target="TopK"
    """
    numbers = 1024 * 256
    assert memory_traffic(module(text)) == 4 * numbers + 2 * numbers + 2 * numbers + 4 * 4


def test_a_copy_that_begins_and_ends_is_one() -> None:
    text = """
        %a = f32[1024]{0} parameter(0)
        %s = (f32[1024]{0}, f32[1024]{0}, u32[]{:S(2)}) copy-start(%a)
        ROOT %d = f32[1024]{0} copy-done(%s)
    """
    assert memory_traffic(module(text)) == 2 * 4096


@pytest.mark.parametrize("there", ["f32[1024]{0:T(1024)S(1)}, f32[1024]{0}", "f32[1024]{0}, f32[1024]{0:T(1024)S(1)}"])
def test_a_copy_to_or_from_the_chip_itself_costs_memory_once(there: str) -> None:
    written, read = there.split(", ")
    text = f"""
        %a = {read} parameter(0)
        %s = ({there}, u32[]{{:S(2)}}) copy-start(%a)
        ROOT %d = {written} copy-done(%s)
    """
    assert memory_traffic(module(text)) == 4096


def test_of_a_stack_only_the_slice_moves_that_is_read() -> None:
    layer, stack = 2 * 64 * 64, "bf16[24,64,64]{2,1,0}"
    slice_ = "bf16[1,64,64]{2,1,0} dynamic-slice(%w, %i), dynamic_slice_sizes={1,64,64}"
    fused = computation(
        "sliced",
        f"""
        %p = {stack} parameter(0)
        %j = s32[] parameter(1)
        %w = {stack} bitcast(%p)
        %s = {slice_.replace("%i", "%j")}
        ROOT %n = bf16[1,64,64] negate(%s)
        """,
    )
    here = f"%w = {stack} parameter(0)\n%i = s32[] parameter(1)\n"
    alone, inside = f"ROOT %s = {slice_}", "ROOT %s = bf16[1,64,64] fusion(%w, %i), kind=kLoop, calls=%sliced"
    for text in (module(here + alone), module(here + inside, fused)):
        assert memory_traffic(text) == 2 * layer + 4
    # a fusion that needs all of it reads all of it
    also = fused.replace("negate(%s)", "add(%s, %s)").replace("dynamic-slice(%w, %j)", "reduce(%w, %j)")
    assert memory_traffic(module(here + inside, also)) == 24 * layer + layer + 4


def test_of_a_stack_only_the_slice_moves_that_is_replaced() -> None:
    layer, stack = 4 * 64 * 64, "f32[24,64,64]{2,1,0}"
    fused = computation(
        "replaced",
        f"""
        %p = {stack} parameter(0)
        %x = bf16[1,64,64] parameter(1)
        %j = s32[] parameter(2)
        %y = f32[1,64,64] convert(%x)
        %u = {stack} dynamic-update-slice(%p, %y, %j)
        ROOT %v = {stack} bitcast(%u)
        """,
    )
    here = f"%w = {stack} parameter(0)\n%n = f32[1,64,64] parameter(1)\n%i = s32[] parameter(2)\n"
    alone = here + f"ROOT %u = {stack} dynamic-update-slice(%w, %n, %i)"
    inside = (
        here.replace("%n = f32", "%n = bf16") + f"ROOT %u = {stack} fusion(%w, %n, %i), kind=kLoop, calls=%replaced"
    )
    assert memory_traffic(module(alone)) == layer + layer + 4
    assert memory_traffic(module(inside, fused)) == layer // 2 + layer + 4


def test_what_goes_through_an_instruction_is_not_moved_by_it() -> None:
    """A product beside which a weight is being gathered: the gather's start wrote it, its end only waits."""
    gathering = computation(
        "beside",
        """
        %own = bf16[16,128] parameter(0)
        %whole = bf16[64,128] parameter(1)
        %x = bf16[8,128] parameter(2)
        %y = bf16[8,128] add(%x, %x)
        ROOT %out = (bf16[8,128], bf16[16,128], bf16[64,128]) tuple(%y, %own, %whole)
    """,
    )
    entry = """
        %own = bf16[16,128] parameter(0)
        %whole = bf16[64,128] parameter(1)
        %x = bf16[8,128] parameter(2)
        %f = (bf16[8,128], bf16[16,128], bf16[64,128]) fusion(%own, %whole, %x), kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}, calls=%beside
        %g = bf16[64,128] get-tuple-element(%f), index=2
        ROOT %done = bf16[64,128] fusion(%g), kind=kCustom, output_to_operand_aliasing={{}: (0, {})}, calls=%beside
    """
    assert memory_traffic(module(entry, gathering)) == 2 * 2 * 8 * 128


def test_a_slice_is_read_and_written_and_not_the_whole_of_it() -> None:
    entry = """
        %a = f32[64,128]{1,0} parameter(0)
        %s = ((f32[64,128]{1,0}), f32[8,128]{1,0:T(8,128)S(1)}, s32[]) slice-start(%a), slice={[0:8], [0:128]}
        ROOT %d = f32[8,128]{1,0:T(8,128)S(1)} slice-done(%s)
    """
    assert memory_traffic(module(entry)) == 4 * 8 * 128  # written on the chip
