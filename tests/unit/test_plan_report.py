"""What is said of a layout, against arithmetic on a made-up program; what is tried where nothing fits."""

import os
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from planned import REFUSAL, compiled, workload
from transformers import AutoConfig

from trl_tpu.data.measure import measure
from trl_tpu.modeling.model_shape import model_without_weights
from trl_tpu.packing.lengths import PairLengths
from trl_tpu.parallel.chips import GiB, parse_topology
from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.plan.child_process import call_in_child
from trl_tpu.plan.compile import CompiledProgram
from trl_tpu.plan.needs import (
    computed_flops,
    least_memory,
    least_seconds,
    least_traffic,
    most_pairs_per_second,
    needed_flops,
)
from trl_tpu.plan.report import found, report, sized
from trl_tpu.plan.search import Attempt, attempt, search
from trl_tpu.plan.workload import Layout, Workload

V6E, FSDP16, SMALL = parse_topology("v6e:4x4"), MeshShape(fsdp=16), parse_topology("v6e:2x4")


@pytest.fixture(scope="module")
def planned() -> Workload:
    """A Llama of 1.2 billion parameters, without weights, with one pair to a row of 2,048."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    config = AutoConfig.for_model("llama", num_attention_heads=32, num_key_value_heads=8, **sizes)
    return workload(model_without_weights(config, "float32"), PairLengths.of_size(2048), packed_attention="masks")


@pytest.fixture
def layout(planned: Workload) -> Layout:
    return Layout(planned, V6E, FSDP16, "full", 2)


def changed(planned: Workload, tokens: Any = None, **settings: Any) -> Workload:
    lengths = planned.lengths if tokens is None else measure(tokens).lengths
    return workload(planned.module, lengths, tokens, **settings)


# ---- the report


def test_times_are_those_of_the_published_speeds(layout: Layout) -> None:
    seconds, received = least_seconds(layout), least_traffic(layout)["fsdp"]
    assert seconds["arithmetic"] == pytest.approx(computed_flops(layout) / 16 / 918e12)
    assert seconds["memory"] == pytest.approx(2 * (least_memory(layout).bound + received) / 1600e9)
    assert seconds["links"] == pytest.approx(received / 400e9)
    assert most_pairs_per_second(layout) == pytest.approx(32 / max(seconds.values()))


def test_the_report_says_whether_it_fits_what_takes_memory_and_what_limits_it(layout: Layout) -> None:
    text = report(Attempt(layout, compiled(layout)), 64_000)
    needed = sized(least_memory(layout).bound + GiB + 2**20 + 1010)
    mfu = needed_flops(layout) / 16 / 918e12 / max(least_seconds(layout).values())
    chip_hours = 64_000 / most_pairs_per_second(layout) / 3600 * 16
    for part in (
        "1.24 Gparameters, 1.24 Gtrained, on v6e:4x4: 16 chip(s) as mesh data=1,fsdp=16, remat full",
        "32 pairs in 32 rows of 2,048 tokens",
        f"IT FITS: {needed} are needed, each chip has 31.25 GiB",
        f"at most {mfu:.0%} of the chips",
        "https://cloud.google.com/tpu/docs/v6e",
        f"{chip_hours:,.4g} chip-hours",
    ):
        assert part in " ".join(text.split()), part
    assert "IT DOES NOT FIT: " in report(Attempt(layout, compiled(layout, temporary=40 * GiB)))


def test_one_chip_receives_nothing(planned: Workload) -> None:
    layout = Layout(planned, parse_topology("v6e:1x1"), MeshShape(), "full", 1)
    assert "nothing at 400 GB/s" in report(Attempt(layout, compiled(layout)))


# ---- the compiler


def refuses(layout: Layout) -> CompiledProgram:
    raise RuntimeError(REFUSAL)


def test_a_layout_that_the_compiler_refuses_does_not_fit_and_its_words_are_kept(layout: Layout) -> None:
    refused = attempt(layout, refuses)
    assert not refused.fits
    assert "IT DOES NOT FIT: Used 49.22G of 31.25G hbm" in report(refused)


def test_another_error_of_the_compiler_is_raised(layout: Layout) -> None:
    def fails(layout: Layout) -> CompiledProgram:
        raise RuntimeError("Ran out of memory in memory space vmem. Used 32.42M of 16.00M vmem.")

    with pytest.raises(RuntimeError, match="vmem"):
        attempt(layout, fails)


def test_an_error_in_a_child_process_says_why_or_with_which_signal_it_ended() -> None:
    with pytest.raises(RuntimeError, match="status -6"):
        call_in_child(os.abort, environment={})
    with pytest.raises(RuntimeError, match="TypeError: .* not int"):
        call_in_child(Path, 4, environment={})
    assert call_in_child(Path, "given", environment={}) == Path("given")


# ---- what would fit


def test_a_search_compiles_the_fastest_by_formula_of_each_mesh_and_policy(planned: Workload) -> None:
    asked: list[Layout] = []

    def says(layout: Layout) -> CompiledProgram:
        asked.append(layout)
        return compiled(layout)

    attempts = search(planned, [SMALL], says, most=8)
    assert len(asked) == len({(each.mesh, each.remat) for each in asked}) == 8
    rates = [most_pairs_per_second(each.layout) for each in attempts]
    assert rates == sorted(rates, reverse=True)
    assert found(attempts).count("v6e:2x4 --mesh data=") == 8
    scanned = changed(planned)
    scanned.args.scan_layers = True  # which the arguments refuse without XLA
    assert "none" not in {each.layout.remat for each in search(scanned, [SMALL], compiled, most=8)}


def test_what_would_fit_ends_with_the_first_or_goes_on_to_a_larger_slice(planned: Workload) -> None:
    asked: list[Layout] = []

    def third_fits(layout: Layout) -> CompiledProgram:
        asked.append(layout)
        return compiled(layout) if len(asked) == 3 else refuses(layout)

    attempts = search(planned, [SMALL], third_fits, 6, until_one_fits=True)
    assert [each.fits for each in attempts] == [False, False, True]
    one_chip = parse_topology("v5e:1x1")  # all of the state is more than its memory
    (larger,) = search(planned, [one_chip, *one_chip.larger()], compiled, 6, until_one_fits=True)
    assert larger.layout.topology == parse_topology("v5e:2x2")
    assert search(planned, [one_chip], refuses, 6) == []
    assert "Nothing fits" in found([])


# ---- rows


def pairs_of(*lengths: tuple[int, int, int]) -> Dataset:
    rows = [
        {"chosen_ids": [number] * prefix + [-1] * chosen, "rejected_ids": [number] * prefix + [-2] * rejected}
        for number, (prefix, chosen, rejected) in enumerate(lengths)
    ]
    return Dataset.from_list(rows)


def test_rows_are_those_that_the_trainer_plans(planned: Workload) -> None:
    rows, length = changed(planned, pairs_of(*[(30, 20, 50)] * 10, *[(100, 10, 10)] * 10)).shape(8, 4)
    assert rows % 4 == 0 and rows * length >= 8 * 100
    long = pairs_of(*[(1000, 700, 700)] * 10)
    assert changed(planned, long, packed_attention="masks").shape(4, 4) == (4, 2400)
    assert changed(planned, long).shape(4, 4) == (4, 2560)  # the kernel's multiple of 256
    assert planned.shape(16, 4) == (16, 2048)
    assert changed(planned, row_length=8192).shape(16, 2) == (4, 8192)  # full rows


def test_padded_rows_have_the_longest_dialogue_and_attend_with_masks(planned: Workload) -> None:
    padded = changed(planned, packing=False)
    assert padded.shape(32, 16) == (64, 1536)
    assert padded.attends_with_masks(4096) and not changed(planned).attends_with_masks(4096)
