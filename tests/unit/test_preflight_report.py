"""Every figure of the report against arithmetic on a made-up program; what is tried where nothing fits."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from made_programs import ARGUMENTS_REFUSED, ONE_ARRAY_REFUSED, REFUSAL, compiled
from transformers import AutoConfig

from trl_tpu.modeling.model_shape import model_without_weights
from trl_tpu.packing.lengths import PairLengths
from trl_tpu.parallel.chips import GiB, parse_topology
from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.plan.apart import Crashed, call_apart
from trl_tpu.plan.case import Case, Job
from trl_tpu.plan.compile import CompiledProgram
from trl_tpu.plan.needs import least_memory, needed_flops
from trl_tpu.plan.report import Report
from trl_tpu.plan.search import attempt, memory_refused, remedies, search
from trl_tpu.plan.text import duration, found_text, refusal_text, sized, text_of

V6E, FSDP16 = parse_topology("v6e:4x4"), MeshShape(fsdp=16)


@pytest.fixture(scope="module")
def job() -> Job:
    """A Llama of 1.2 billion parameters, without weights, with one pair to a row of 2,048."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    config = AutoConfig.for_model("llama", num_attention_heads=32, num_key_value_heads=8, **sizes)
    lengths, basis, notes = PairLengths.of_size(2048), "From somewhere.", ("Of few layers.",)
    return Job(model_without_weights(config, "float32"), lengths, basis, notes, packed_attention="masks")


@pytest.fixture
def case(job: Job) -> Case:
    """It attends with masks, so that the program has all operations."""
    return Case(job, V6E, FSDP16, "full", 2)


def changed(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, job=job_with(case.job, **changes))


def job_with(job: Job, **changes: Any) -> Job:
    return dataclasses.replace(job, **changes)


# ---- the figures


def test_kinds_of_memory_add_up_to_the_peak(case: Case) -> None:
    report, least = Report(case, compiled(case)), least_memory(case)
    assert report.memory_by_kind == {
        "weights": least.weights,
        "optimizer": least.optimizer,
        "gradients": least.gradients,
        "activations": least.activations,
        "batch and other inputs": 1000,
        "working space": GiB + 10,
        "program": 2**20,
    }
    assert sum(report.memory_by_kind.values()) == report.program.peak == least.bound + 1000 + GiB + 10 + 2**20
    assert report.fits and not Report(case, compiled(case, temporary=40 * GiB)).fits


def test_kinds_add_up_too_where_the_compiler_does_better_than_the_formula(case: Case) -> None:
    report = Report(case, compiled(case, temporary=1000))
    assert sum(report.memory_by_kind.values()) == report.program.peak
    assert report.memory_by_kind["working space"] == 0


def test_buffers_for_gradients_are_arguments_and_the_optimizer_may_be_idle(case: Case) -> None:
    least = least_memory(case)
    state = {"weight": least.weights, "optimizer": least.optimizer, "gradient": least.gradients}
    arguments = least.weights + least.gradients + 1000
    report = Report(case, compiled(case, arguments=arguments, idle=least.optimizer, state=state))
    kinds = report.memory_by_kind
    assert (kinds["gradients"], kinds["optimizer"]) == (least.gradients, least.optimizer)
    assert kinds["batch and other inputs"] == 1000
    assert sum(kinds.values()) == report.program.peak


def test_times_are_those_of_the_published_speeds(case: Case) -> None:
    report = Report(case, compiled(case, flops=918e12))
    assert report.seconds["arithmetic"] == pytest.approx(1.0)
    assert report.seconds["memory"] == pytest.approx(1e11 / 1600e9)
    assert report.seconds["links"] == pytest.approx(30e9 / 400e9)
    assert report.bounds == (report.seconds["arithmetic"], pytest.approx(sum(report.seconds.values())))
    assert report.limit == "arithmetic"
    assert report.pairs_per_second[0] == pytest.approx(32.0)
    assert Report(case, compiled(case, flops=0.0, bytes_moved=0.0)).limit == "links"


def test_mfu_counts_what_is_needed(case: Case) -> None:
    needed = Report(case, compiled(case)).flops.needed
    report = Report(case, compiled(case, flops=needed / 16 * 2, bytes_moved=0.0, received={}))
    assert report.mfu == pytest.approx(0.5)
    attends = changed(case, packed_attention="auto")  # by a kernel, which the compiler does not count
    kernels = needed_flops(attends).kernels
    assert kernels > 0
    assert Report(attends, report.program).flops_compiled == pytest.approx(2 * needed + kernels)


def test_hours_and_cost_follow_from_the_pairs(case: Case) -> None:
    program = compiled(case, flops=918e12 * 3.6, bytes_moved=0.0, received={})  # 32 pairs in 3.6 s
    report = Report(case, program, pairs_to_train=64_000, price_per_chip_hour=1.5)
    assert report.hours == (pytest.approx(2.0), pytest.approx(2.0))
    said = report.as_json()
    assert said["chip_hours"] == (pytest.approx(32.0), pytest.approx(32.0))
    assert said["cost"] == (pytest.approx(48.0), pytest.approx(48.0))
    assert "at least 48.00" in text_of(report)
    unpriced = Report(case, program, pairs_to_train=64_000)
    assert unpriced.as_json()["cost"] == () and "chip-hour:" not in text_of(unpriced)
    assert Report(case, program).as_json()["hours"] == ()


# ---- the text


def test_the_text_says_all_that_is_asked_of_it(case: Case) -> None:
    text = text_of(Report(case, compiled(case), pairs_to_train=1000))
    for part in (
        "1.24 billion parameters, on v6e:4x4: 16 chip(s) as mesh data=1,fsdp=16, remat full",
        "32 pairs in 32 rows of 2,048 tokens",
        "From somewhere.",
        "Of few layers.",
        "IT FITS: ",
        "working space",
        "times the first four",
        "PFLOP",
        "Attention with masks computes",
        "fsdp",
        "https://cloud.google.com/tpu/docs/v6e",
        "(MFU)",
        "1,000 pairs: at least",
        "Compiling took 12 s on",
        "30 GB in all-gather bf16[512,256] over fsdp",
        "What compiling ahead of time cannot show",
    ):
        assert part in text, part
    assert all(len(line) <= 119 for line in text.splitlines())
    assert "IT DOES NOT FIT: " in text_of(Report(case, compiled(case, temporary=40 * GiB)))


def test_the_largest_arrays_of_what_does_not_fit_are_said(case: Case) -> None:
    buffers = (("bf16[8,128] fusion layer.3", 2**30),)
    assert "1.00 GiB bf16[8,128] fusion layer.3" in text_of(
        Report(case, compiled(case, temporary=40 * GiB, largest_buffers=buffers))
    )
    assert "fusion layer.3" not in text_of(Report(case, compiled(case, largest_buffers=buffers)))


def test_padding_is_said_to_be_computed_but_not_needed(case: Case) -> None:
    padded = changed(case, is_packed=False)
    assert padded.shape == (64, 1536) and padded.masks
    assert "Of the columns of the rows 67% hold a token" in text_of(Report(padded, compiled(padded)))


def test_one_chip_has_no_table_of_links(job: Job) -> None:
    case = Case(job, parse_topology("v6e:1x1"), MeshShape(), "full", 1)
    assert "Sent between chips" not in text_of(Report(case, compiled(case)))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (119.0, "119 s"), (180.0, "3 min"), (9000.0, "2.5 h")],
)
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert duration(3600 * 12345) == "12,345 h"


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


def refuses(case: Case) -> CompiledProgram:
    raise RuntimeError(REFUSAL)


def test_a_case_that_the_compiler_refuses_does_not_fit_and_says_what_it_needs(case: Case) -> None:
    refused, least = attempt(case, refuses), least_memory(case)
    needed = int(49.22 * GiB) + least.weights + least.optimizer  # of arguments the compiler does not speak
    assert (refused.fits, refused.needed) == (False, needed)
    assert f"the compiler gave up at {sized(needed)} on each chip, which has 31.25 GiB" in refusal_text(refused)


def test_a_crash_of_the_compiler_leaves_open_whether_it_fits(job: Job, case: Case) -> None:
    def crashes(case: Case) -> CompiledProgram:
        raise Crashed("The compiler crashed: Segmentation fault. It printed last: frame 1")

    crashed = attempt(case, crashes)
    assert not crashed.fits and crashed.as_json()["crash"]
    text = refusal_text(crashed)
    assert "IS OPEN: the compiler crashed" in text and "frame 1" in text
    whole = attempt(Case(job, parse_topology("v5e:1x1"), MeshShape(), "none", 16), crashes)
    assert "IT DOES NOT FIT: the compiler crashed; by formula it needs at least" in refusal_text(whole)
    found = search(job, V6E, crashes, most=2)  # goes on after a crash
    assert len(found.attempts) == 2
    assert "at least, by formula; the compiler crashed" in found_text(found)


def test_a_process_that_a_signal_ends_has_crashed_and_one_that_raises_says_why() -> None:
    with pytest.raises(Crashed, match="os.abort crashed: Aborted"):
        call_apart("apart:os.abort", environment={})
    with pytest.raises(RuntimeError, match="TypeError: .* not int"):
        call_apart("apart:Path", 4, environment={})
    assert call_apart("apart:Path", "given", environment={}) == Path("given")


def test_a_search_compiles_what_is_fastest_by_formula_and_sorts_by_what_the_compiler_says(job: Job) -> None:
    asked: list[Case] = []

    def says(case: Case) -> CompiledProgram:
        asked.append(case)
        slow = 1e15 if case.remat == "none" else 1e14
        return compiled(case, flops=slow * case.pairs, bytes_moved=1.0, received={})

    found = search(job, parse_topology("v6e:2x4"), says, most=8)
    assert len(asked) == len({(case.mesh, case.remat) for case in asked}) == 8
    assert {each.case.topology for each in found.attempts} == {parse_topology("v6e:2x4")}
    rates = [each.report.pairs_per_second[0] for each in found.attempts if each.report is not None and each.fits]
    assert rates and rates == sorted(rates, reverse=True)
    text = found_text(found)
    assert text.count("--per_device_train_batch_size") == 8
    assert "Left out are ways that need more memory by formula than there is" in text


def test_remedies_end_with_the_first_that_fits_or_go_on_to_a_larger_slice(job: Job) -> None:
    asked: list[Case] = []

    def third_fits(case: Case) -> CompiledProgram:
        asked.append(case)
        return compiled(case) if len(asked) == 3 else refuses(case)

    found = remedies(job, parse_topology("v6e:2x4"), third_fits, 6)
    assert len(asked) == len(found.attempts) == 3
    assert found.attempts[0].fits
    assert len(remedies(job, parse_topology("v6e:2x4"), refuses, 2).attempts) == 2
    one_chip = parse_topology("v5e:1x1")  # all of the state is more than its memory
    assert remedies(job, one_chip, compiled, 6).topology == parse_topology("v5e:2x2")


def test_where_nothing_fits_the_search_says_so(job: Job) -> None:
    def unasked(case: Case) -> CompiledProgram:
        raise AssertionError("nothing should be compiled")

    found = search(job, parse_topology("v5e:1x1"), unasked)
    assert found.attempts == []
    assert "Nothing fits" in found_text(found)


# ---- rows


def test_rows_are_those_that_the_trainer_plans(job: Job) -> None:
    pairs = PairLengths.of([(30, 20, 50)] * 10 + [(100, 10, 10)] * 10)
    rows, length = job_with(job, lengths=pairs).shape(8, 4)
    assert rows % 4 == 0 and rows * length >= 8 * 100
    long = job_with(job, lengths=PairLengths.of([(1000, 700, 700)] * 10))
    assert long.shape(4, 4) == (4, 2400)
    assert job_with(long, packed_attention="auto").shape(4, 4) == (4, 2560)  # the kernel's multiple of 256
    assert job.shape(16, 4) == (16, 2048)
    assert job_with(job, row_settings={"row_length": 8192}).shape(16, 2) == (4, 8192)  # full rows
