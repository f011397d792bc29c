"""Every figure of the report against arithmetic on a made-up program; what is tried where nothing fits."""

import dataclasses
from pathlib import Path

import pytest
import torch
from made_programs import ARGUMENTS_REFUSED, ONE_ARRAY_REFUSED, REFUSAL, compiled
from transformers import AutoConfig, AutoModelForSequenceClassification

from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.preflight.attention_blocks import kernel_unit_flops
from trl_tpu.preflight.case import Case
from trl_tpu.preflight.chips import GiB, parse_topology
from trl_tpu.preflight.job import DataRows, FullRows, Job, PaddedRows
from trl_tpu.preflight.lengths import PairLengths
from trl_tpu.preflight.memory import least_memory
from trl_tpu.preflight.program import CompiledProgram
from trl_tpu.preflight.report import Report, Training
from trl_tpu.preflight.roofline import Roofline
from trl_tpu.preflight.search import attempt, memory_refused, remedies, search, try_remedies
from trl_tpu.preflight.text import duration, found_text, refusal_text, remedies_text, sized, text_of
from trl_tpu.preflight.trace import Crashed, run_apart

V6E = parse_topology("v6e:4x4")


@pytest.fixture(scope="module")
def job() -> Job:
    """A Llama of 1.2 billion parameters, without weights."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = AutoConfig.for_model("llama", num_labels=1, **sizes, **heads)
    with torch.device("meta"):
        return Job(AutoModelForSequenceClassification.from_config(config), FullRows(2048))


@pytest.fixture
def case(job: Job) -> Case:
    """It attends with masks, so that the program has all operations."""
    return dataclasses.replace(job.case(V6E, MeshShape(fsdp=16), "full", 2), masks=True)


def test_kinds_of_memory_add_up_to_the_peak(case: Case) -> None:
    report = Report(case, compiled(case))
    least = least_memory(case)
    kinds = report.memory_by_kind()
    assert kinds == {
        "weights": least.weights,
        "optimizer": least.optimizer,
        "gradients": least.gradients,
        "activations": least.activations,
        "batch and other inputs": 1000,
        "working space": GiB + 10,
        "program": 2**20,
    }
    assert sum(kinds.values()) == report.peak == least.bound + 1000 + GiB + 10 + 2**20
    assert report.free == V6E.chip.memory - report.peak


@pytest.mark.parametrize("accumulation", [1, 4])
def test_kinds_add_up_too_where_the_compiler_does_better_than_the_formula(case: Case, accumulation: int) -> None:
    case = dataclasses.replace(case, accumulation=accumulation)
    report = Report(case, compiled(case, temporary=1000))
    assert sum(report.memory_by_kind().values()) == report.peak
    assert report.memory_by_kind()["working space"] >= 0


def test_state_is_what_was_traced_where_it_was(case: Case) -> None:
    least = least_memory(case)
    kept = 3 * least.weights  # an optimizer that the formulas do not know
    extra = kept - least.optimizer
    program = compiled(case, arguments=least.weights + kept + 1000, aliased=least.weights + kept - 10)
    program = dataclasses.replace(program, weights=least.weights, optimizer=kept, outputs=program.arguments)
    report = Report(case, program)
    kinds = report.memory_by_kind()
    assert (kinds["weights"], kinds["optimizer"], kinds["batch and other inputs"]) == (least.weights, kept, 1000)
    assert sum(kinds.values()) == report.peak
    assert report.least.bound == least.bound + extra
    assert "there twice" not in text_of(report)


def test_what_a_pass_does_not_take_is_on_the_chip_all_the_same(case: Case) -> None:
    case = dataclasses.replace(case, accumulation=4)
    least = least_memory(case)
    state = {"weights": least.weights, "optimizer": least.optimizer, "gradients": least.gradients}
    taken = {"arguments": least.weights + least.gradients + 1000, "aliased": least.gradients}
    report = Report(case, compiled(case, **state, **taken, outputs=least.gradients, idle=least.optimizer))
    kinds = report.memory_by_kind()
    assert {name: kinds[name] for name in state} == state
    assert kinds["batch and other inputs"] == 1000
    assert sum(kinds.values()) == report.peak
    assert report.updated == least.gradients
    assert "there twice" not in text_of(report)


def test_the_time_of_a_step_is_each_figure_over_its_published_speed(case: Case) -> None:
    times = Report(case, compiled(case, flops=9.18e14)).times
    assert times.compute == pytest.approx(1.0)
    assert times.memory == pytest.approx(1e11 / 1600e9)
    assert times.links == pytest.approx(2 * 16e9 * 15 / 16 / 400e9)
    assert times.fastest == times.compute
    assert times.limit == "arithmetic"
    assert times.slowest == pytest.approx(times.compute + times.memory + times.links)
    assert times.most_pairs_per_second == pytest.approx(32.0)


def test_mfu_counts_what_is_needed(case: Case) -> None:
    report = Report(case, compiled(case))
    twice = report.flops.useful / 16 * 2
    report = Report(case, compiled(case, flops=twice, bytes_accessed=0.0, collectives=()))
    assert report.times.most_mfu == pytest.approx(0.5)
    attends = dataclasses.replace(case, masks=False)  # by a kernel, which the compiler does not count
    kernels = kernel_unit_flops(attends)
    assert kernels > 0
    compute = (twice + kernels / 16) / case.topology.chip.peak_flops
    assert Report(attends, report.program).times.compute == pytest.approx(compute)


def test_operations_are_said_for_a_step_and_a_pair_beside_what_the_formula_says(case: Case) -> None:
    report = Report(case, compiled(case))
    flops, chips = report.flops, 16
    exact = Report(case, compiled(case, flops=flops.with_remat / chips))
    said = exact.as_json()
    assert said["flops_compiled"] == pytest.approx(said["flops_with_remat"])
    for name in ("compiled", "needed", "with_remat"):
        assert said[f"flops_{name}_per_pair"] == pytest.approx(said[f"flops_{name}"] / 32)
    rows = [line.split() for line in text_of(exact).splitlines() if "FLOP a pair" in line]
    assert [row[0] for row in rows] == ["needed", "with", "compiled"]
    times = f"{flops.with_remat / flops.useful:.2f} times what is needed"
    assert text_of(exact).count(times) == 2
    plain = Report(dataclasses.replace(case, remat="none"), compiled(case))
    assert "with remat" not in text_of(plain)


def test_the_slowest_part_is_named() -> None:
    assert Roofline(1, 2, 3, 1, 1).limit == "links"
    assert Roofline(1, 4, 3, 1, 1).limit == "memory"


def test_hours_and_cost_follow_from_the_dataset(case: Case) -> None:
    program = compiled(case, flops=918e12 * 3.6, bytes_accessed=0.0, collectives=())  # 32 pairs in 3.6 s
    report = Report(case, program, Training(pairs=32_000, epochs=2, price_per_chip_hour=1.5))
    assert report.hours == (pytest.approx(2.0), pytest.approx(2.0))
    said = report.as_json()
    assert said["chip_hours"] == [pytest.approx(32.0)] * 2
    assert said["cost"] == [pytest.approx(48.0)] * 2
    assert "at least 48.00" in text_of(report)
    unpriced = Report(case, program, Training(pairs=32_000))
    assert unpriced.as_json()["cost"] is None
    assert "chip-hour:" not in text_of(unpriced)
    assert Report(case, program).as_json()["hours"] is None


def test_the_text_says_all_that_is_asked_of_it(case: Case) -> None:
    text = text_of(Report(case, compiled(case), Training(1000, 1), "From somewhere."))
    for part in (
        "1.24 billion parameters, on v6e:4x4: 16 chip(s) as mesh data=1,fsdp=16, remat full",
        "32 pairs in 32 rows of 2,048 tokens",
        "From somewhere.",
        "IT FITS: ",
        "working space",
        "times the first four",
        "PFLOP",
        "fsdp",
        "https://cloud.google.com/tpu/docs/v6e",
        "(MFU)",
        "1,000 pairs, 1 time(s)",
        "Compiling took 12 s on",
        "Most is sent by:",
        "2 x all-gather bf16[1] over fsdp",
        "What compiling ahead of time cannot show",
    ):
        assert part in text, part
    assert all(len(line) <= 119 for line in text.splitlines())


def test_what_is_wrong_is_said(case: Case) -> None:
    state = least_memory(case).weights + least_memory(case).optimizer
    text = text_of(Report(case, compiled(case, aliased=0)))
    assert "Only 0.00 MiB of the" in text
    big = compiled(case, temporary=40 * GiB, largest_buffers=(("f32[16,2048,2048] dot", 2 * GiB),))
    text = text_of(Report(case, big))
    assert "IT DOES NOT FIT: " in text
    assert "f32[16,2048,2048] dot" in text
    assert state > 0


def test_padding_is_said_to_be_computed_but_not_needed(job: Job) -> None:
    case = dataclasses.replace(job, batching=PaddedRows(1024)).case(V6E, MeshShape(fsdp=16), "none", 1)
    assert (case.rows, case.length, case.pairs) == (32, 1024, 16)
    assert case.lengths.tokens == 16 * (1024 + 256)
    assert "Of the columns of the rows 62% hold a token" in text_of(Report(case, compiled(case)))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (119.0, "119 s"), (180.0, "3 min"), (9000.0, "2.5 h")],
)
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert duration(3600 * 12345) == "12,345 h"


def test_one_chip_has_no_table_of_links(job: Job) -> None:
    case = job.case(parse_topology("v6e:1x1"), MeshShape(), "full", 1)
    assert "Sent between chips" not in text_of(Report(case, compiled(case, collectives=())))


# ---- what would fit


def test_a_refusal_for_memory_is_read_and_others_are_not() -> None:
    assert memory_refused(REFUSAL) == int(49.22 * GiB)
    assert memory_refused(ARGUMENTS_REFUSED) == int(8.58 * GiB) - int(5.24 * GiB)
    assert memory_refused(ONE_ARRAY_REFUSED) == 80025600000
    assert memory_refused("Used 512.00M of 16.00M hbm") == 512 * 2**20
    assert memory_refused("Ran out of memory in memory space vmem. Used 32.42M of 16.00M vmem.") is None
    assert memory_refused("INTERNAL: something else") is None


def test_another_error_of_the_compiler_is_raised(case: Case) -> None:
    def fails(case: Case) -> CompiledProgram:
        raise RuntimeError("INTERNAL: something else")

    with pytest.raises(RuntimeError, match="something else"):
        attempt(case, fails)


def test_a_case_that_the_compiler_refuses_does_not_fit_and_says_what_it_needs(case: Case) -> None:
    def refuses(case: Case) -> CompiledProgram:
        raise RuntimeError(REFUSAL)

    refused, least = attempt(case, refuses), least_memory(case)
    needed = int(49.22 * GiB) + least.weights + least.optimizer  # of arguments the compiler does not speak
    assert (refused.fits, refused.compiled, refused.needed) == (False, True, needed)
    assert f"the compiler gave up at {sized(needed)} on each chip, which has 31.25 GiB" in refusal_text(refused)


def test_a_crash_of_the_compiler_leaves_open_whether_it_fits(job: Job, case: Case) -> None:
    def crashes(case: Case) -> CompiledProgram:
        raise Crashed("The compiler crashed: Segmentation fault. It printed last: frame 1")

    open_ = attempt(case, crashes)
    assert not open_.fits and open_.as_json()["crash"]
    text = refusal_text(open_)
    assert "IS OPEN: the compiler crashed" in text and "frame 1" in text
    assert "at least, by formula; the compiler crashed" in remedies_text([open_])
    whole = attempt(job.case(parse_topology("v5e:1x1"), MeshShape(), "none", 16), crashes)
    assert "IT DOES NOT FIT: it needs at least" in refusal_text(whole)
    assert "cannot fit 15.75 GiB" in remedies_text([whole])
    found = search(job, V6E, crashes, most=2)  # goes on after a crash
    assert len(found.attempts) == 2


def test_a_process_that_a_signal_ends_has_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies.py").write_text("import os, sys; print('last', file=sys.stderr, flush=True); os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Crashed, match="(?s)dies crashed: Aborted.*last"):
        run_apart("dies", [], {})


def test_changes_are_tried_from_the_mildest_until_one_fits(job: Job) -> None:
    topology = parse_topology("v5e:2x2")
    asked = job.case(topology, MeshShape(data=4), "dots", 4)
    seen = []

    def fits_from_two_pairs(case: Case) -> CompiledProgram:
        seen.append(case)
        size = 20 * GiB if case.pairs > 4 else 2 * GiB
        return compiled(case, temporary=size, arguments=0, outputs=0, aliased=0)

    # all weights on every chip cannot fit a chip, by formula
    tried = try_remedies(job, asked, fits_from_two_pairs)
    assert [each.what for each in tried] == [
        "--remat full",
        "--mesh data=1,fsdp=4",
        "--per_device_train_batch_size 2",
        "--per_device_train_batch_size 1",
        "--mesh data=1,fsdp=4 --remat full --per_device_train_batch_size 1",
    ]
    assert [each.compiled for each in tried] == [False, True, False, False, True]
    assert [each.fits for each in tried] == [False] * 4 + [True]
    assert len(seen) == 2
    text = remedies_text(tried)
    assert text.count("cannot fit 15.75 GiB") == 3
    assert text.count("FITS") == 1


def test_a_larger_slice_is_the_last_change(job: Job) -> None:
    case = job.case(parse_topology("v6e:8x16"), MeshShape(fsdp=128), "full", 1)
    assert [what for what, _ in remedies(job, case)] == ["--topology v6e:16x16 --mesh data=1,fsdp=256"]
    largest = job.case(parse_topology("v6e:16x16"), MeshShape(fsdp=256), "full", 1)
    assert list(remedies(job, largest)) == []
    assert "name a larger slice" in remedies_text([])


def test_no_more_is_compiled_than_allowed(job: Job, case: Case) -> None:
    asked = []

    def never_fits(case: Case) -> CompiledProgram:
        asked.append(case)
        return compiled(case, temporary=50 * GiB)

    tried = try_remedies(job, case, never_fits, most=2)
    assert len(asked) == 2
    assert "None of these fits" in remedies_text(tried)


def test_a_search_compiles_what_is_fastest_by_formula_and_sorts_by_what_the_compiler_says(job: Job) -> None:
    asked: list[Case] = []

    def says(case: Case) -> CompiledProgram:
        asked.append(case)
        slow = 1e15 if case.remat == "none" else 1e14
        return compiled(case, flops=slow * case.pairs, bytes_accessed=1.0, collectives=())

    found = search(job, parse_topology("v6e:2x4"), says, most=8)
    assert len(asked) == 8
    assert len({(case.mesh, case.remat) for case in asked}) == 8
    assert found.too_large > 0
    rates = [each.times.most_pairs_per_second for each in found.attempts if each.fits]
    assert rates == sorted(rates, reverse=True)
    assert {each.case.remat for each in found.attempts if each.fits} & {"dots", "full"}
    text = found_text(found, parse_topology("v6e:2x4"), "Somewhere.")
    assert text.count("--per_device_train_batch_size") == 8
    assert f"Left out: {found.too_large} ways" in text.replace("\n", " ")


def test_where_nothing_fits_the_search_says_so(job: Job) -> None:
    def unasked(case: Case) -> CompiledProgram:
        raise AssertionError("nothing should be compiled")

    huge = dataclasses.replace(job, batching=FullRows(2**20))
    found = search(huge, parse_topology("v5e:1x1"), unasked)
    assert found.attempts == ()
    assert "Nothing fits" in found_text(found, parse_topology("v5e:1x1"), "")


# ---- rows


def test_full_rows_take_several_pairs_and_go_over_all_parts() -> None:
    rows = FullRows(2048, pairs_per_row=4)
    assert rows.rows(32, 4) == (8, 2048)
    assert rows.rows(4, 4) == (4, 2048)
    assert rows.lengths(32).tokens == 8 * 2048
    assert "512 unique tokens" in str(rows)


def test_rows_of_data_are_those_that_the_trainer_plans() -> None:
    pairs = PairLengths.of([(30, 20, 50)] * 10 + [(100, 10, 10)] * 10)
    rows = DataRows(pairs, {"max_shapes": 1})
    planned, length = rows.rows(8, 4)
    assert planned % 4 == 0
    assert planned * length >= 8 * 100
    long = DataRows(PairLengths.of([(1000, 700, 700)] * 10), {"max_shapes": 1})
    assert long.rows(4, 4) == (4, 2560)  # the kernel's multiple of 256
    assert DataRows(long.pairs, {"max_shapes": 1}, attention="masks").rows(4, 4) == (4, 2400)
    assert set(rows.lengths(50).sizes_P.tolist()) == {100, 120}
    assert "20 pairs of the dataset: 110 unique tokens on average, 120 at most" in str(rows)
