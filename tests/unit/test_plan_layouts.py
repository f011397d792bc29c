"""Layouts of a plan: their rows, their bounds against arithmetic, the report, and what is compiled for a search."""

import os
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from planned import REFUSAL, compiled
from transformers import AutoConfig, AutoModelForSequenceClassification

from trl_tpu.config.reward_config import RewardConfig
from trl_tpu.modeling.model_shape import model_without_weights
from trl_tpu.packing.shapes import PairLengths
from trl_tpu.parallel.mesh import GiB, MeshShape, parse_topology
from trl_tpu.plan import layouts
from trl_tpu.plan.compile import CompiledProgram, call_in_child, received
from trl_tpu.plan.layouts import Attempt, Layout, attempt, depths_of, extend, report, scaled, sized
from trl_tpu.runtime import Remat


@pytest.fixture(scope="module")
def layout() -> Layout:
    """A Llama of 1.2 billion parameters, without weights, on 16 chips."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    config = AutoConfig.for_model("llama", num_attention_heads=32, num_key_value_heads=8, **sizes)
    args = RewardConfig("unused", report_to="none", use_cpu=True, bf16=True)
    model, lengths = model_without_weights(config, "float32"), PairLengths.of_size(2048)
    return Layout(model, args, lengths, None, parse_topology("v6e:4x4"), MeshShape(fsdp=16), Remat.FULL, 2)


# ---- bounds


def test_times_are_the_compilers_operations_and_received_bytes_at_published_speeds(layout: Layout) -> None:
    seconds = Attempt(layout, compiled(layout, flops=90e12)).seconds
    assert seconds == {"arithmetic": 90e12 / 918e12, "links": 4e9 / 400e9}
    # the compiler counts no operations of kernels, and a loop once: a step needs no less than the model
    least = layout.needed_flops / 16
    assert Attempt(layout, compiled(layout, flops=0.0)).seconds["arithmetic"] == least / 918e12
    assert Attempt(layout, compiled(layout)).most_pairs_per_second == 32 / max(4e9 / 400e9, least / 918e12)


def test_the_report_says_whether_it_fits_what_takes_memory_and_what_limits_it(layout: Layout) -> None:
    tried = Attempt(layout, compiled(layout, flops=40e12))
    hours = 64_000 / 32 * 40e12 / 918e12 / 3600
    text = " ".join(report(tried, 64_000).split())
    for part in (
        f"IT FITS: {sized(3 * GiB + 2**20 + 10)} are needed, each chip has 31.25 GiB",
        f"{scaled(layout.needed_flops / 16)}FLOP are needed by the model",
        f"at most {layout.needed_flops / 16 / 40e12:.0%} of the chips' arithmetic",
        f"{hours * 16:,.4g} chip-hours",
    ):
        assert part in text, part
    assert "IT DOES NOT FIT: " in report(Attempt(layout, compiled(layout, temporary=40 * GiB)))


def test_collectives_count_what_a_chip_receives_once_per_channel() -> None:
    lines = [
        " %a = bf16[8,128]{1,0:T(8,128)} all-gather(%x), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}",
        " %again = bf16[8,128]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}",
        " %b = (f32[100]{0}, f32[]) all-reduce(%y, %z), channel_id=2, replica_groups=[2,4]<=[8], to_apply=%add",
        " %c = f32[25]{0} reduce-scatter(%y), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}",
        " %d = (s8[64], s8[64], u32[], u32[]) collective-permute-start(%w), channel_id=4, source_target_pairs={{0,1}}",
        " %e = f32[8] add(%b, %c), metadata={op_name=all-gather}",
    ]
    assert received("\n".join(lines)) == 2 * 8 * 128 / 2 + 4 * 101 * 3 / 4 + 4 * 25 * 4 * 3 / 4 + 64


# ---- the compiler


def test_only_a_program_that_needs_too_much_memory_does_not_fit(layout: Layout) -> None:
    tried = attempt(layout, Mock(side_effect=RuntimeError(REFUSAL)))
    assert not tried.fits and "Used 49.22G of 31.25G hbm" in report(tried)
    with pytest.raises(RuntimeError, match="vmem"):
        attempt(layout, Mock(side_effect=RuntimeError("Used 32.42M of 16.00M vmem.")))


def test_an_error_in_a_child_process_says_why_or_with_which_signal_it_ended() -> None:
    with pytest.raises(RuntimeError, match="status -6"):
        call_in_child(os.abort, environment={})
    with pytest.raises(RuntimeError, match="TypeError: .* not int"):
        call_in_child(Path, 4, environment={})
    assert call_in_child(Path, "given", environment={}) == Path("given")


# ---- deep models


def tiny(model_type: str, layers: int, **settings: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64, "num_labels": 1}
    return AutoConfig.for_model(model_type, num_hidden_layers=layers, **sizes, **settings)


def test_of_many_layers_two_depths_with_whole_periods_are_compiled_and_extended() -> None:
    assert depths_of(tiny("llama", 24)) == (24,)
    assert depths_of(tiny("llama", 80), compiles_all=True) == (80,)
    assert depths_of(tiny("llama", 32)) == (2, 4)
    assert depths_of(tiny("llama", 35)) == (3, 5)
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 10
    assert depths_of(tiny("gemma3_text", 26, layer_types=kinds[:26])) == (8, 14)
    assert depths_of(tiny("gemma3_text", 60, layer_types=kinds)) == (6, 12)

    def program(layers: int) -> CompiledProgram:
        return CompiledProgram(10 + 3 * layers, 1, 1000 + 7 * layers, 5 + layers, 2.0 * layers, 8.0 + layers)

    assert extend([program(4), program(8)], (4, 8), 48) == program(48)
    assert extend([program(8)], (8,), 8) == program(8)
    assert extend([program(8), replace(program(4), results=0)], (4, 8), 480).results == 0
    assert min(astuple(extend([program(8), program(4)], (4, 8), 4800))) == 0
    whole = tiny("gemma3_text", 12, layer_types=["sliding_attention", "full_attention"] * 6, head_dim=8)
    assert len(AutoModelForSequenceClassification.from_config(layouts.with_layers(whole, 4)).model.layers) == 4
    assert whole.num_hidden_layers == len(whole.layer_types) == 12


def test_of_several_layouts_the_fastest_that_fits_comes_first(layout: Layout) -> None:
    def tried(fsdp: int, **changes: float) -> Attempt:
        return Attempt(replace(layout, mesh=MeshShape(fsdp=fsdp)), compiled(layout, **changes))

    attempts = [tried(1, temporary=40 * GiB), tried(2, received=8e10), tried(16, received=4e10)]
    rows = layouts.found(attempts).splitlines()[1:4]
    assert ["fsdp=16 " in rows[0], "fsdp=2 " in rows[1]] == [True, True]
    assert [row.count("FITS") for row in rows] == [1, 1, 0]
