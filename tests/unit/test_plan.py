"""The command ``trl-tpu plan``: from flags and YAML to compiled layouts and printed text, with a fake compiler."""

import os
import re
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from fake_compiler import OOM_ERROR, compiled, layouts_of, save_config
from label_formats import solutions
from transformers import AutoConfig, AutoModelForSequenceClassification

from trl_tpu.config.reward_config import RewardConfig
from trl_tpu.errors import UserError
from trl_tpu.modeling.head_spec import HeadSpec
from trl_tpu.modeling.heads import model_without_weights
from trl_tpu.packing.shapes import BatchShape, RowLengths
from trl_tpu.parallel.mesh import GiB, MeshShape, parse_topology
from trl_tpu.plan import layouts
from trl_tpu.plan.compile import CompiledProgram, TracedProgram, call_in_child, moved, received
from trl_tpu.plan.layouts import Attempt, Layout, depths_of, extrapolate
from trl_tpu.plan.trace import StepRequest
from trl_tpu.runtime import Remat
from trl_tpu.runtime.native import Runtime
from trl_tpu.scripts import plan, synthetic

WORDS = ["--report_to", "none", "--topology", "v6e:1x1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_config(folder)
    return str(folder)


def planned(model: str, more: str = "") -> list[Layout]:
    return layouts_of("--model_name_or_path", model, *WORDS, *more.split())


def test_config_without_data_is_planned_and_printed(model: str, capsys: pytest.CaptureFixture) -> None:
    words = "--per_device_train_batch_size 4 --row_length 512 --pairs_in_dataset 1000 --remat dots"
    (layout,) = planned(model, words)
    assert (layout.batch_size, layout.shape, layout.remat) == (4, BatchShape(4, 512), "dots")
    printed = capsys.readouterr().out
    assert "IT FITS" in printed and "1 rows of 512 unique tokens" in printed
    assert "3,000 rows" in printed  # transformers trains 3 epochs by default
    planned(model, f"{words} --max_steps 10 --gradient_accumulation_steps 2")
    assert "80 rows" in capsys.readouterr().out  # `max_steps` decides, not the size of the dataset
    (layout,) = planned(model, f"{words} --packing false")
    assert layout.shape == BatchShape(8, 512)  # one sequence per row


def test_plan_that_does_not_fit_suggests_alternatives(model: str, capsys: pytest.CaptureFixture) -> None:
    seen: list[tuple[str, str, int]] = []

    def compile_one(layout: Layout) -> CompiledProgram:
        seen.append((str(layout.mesh), layout.remat, layout.device_batch_size))
        if layout.device_batch_size > 2:
            raise RuntimeError(OOM_ERROR)
        return compiled(layout)

    words = ["--model_name_or_path", model, *WORDS, "--per_device_train_batch_size", "8", "--remat"]
    assert plan.run([*words, "dots"], compile_one=compile_one) == 1
    one_chip = "data=1,fsdp=1"
    assert seen == [(one_chip, "dots", 8), *((one_chip, "full", pairs) for pairs in (8, 4, 2))]
    printed = capsys.readouterr().out
    assert printed.index("IT DOES NOT FIT") < printed.index("--per_device_train_batch_size 2")
    assert "Used 49.22G of 31.25G hbm" in printed
    seen.clear()
    assert plan.run([*words, "full", "--compiles", "1"], compile_one=compile_one) == 1
    assert seen == [(one_chip, "full", 8), (one_chip, "full", 4)]

    def fail(_: Layout) -> CompiledProgram:
        raise RuntimeError("Used 32.42M of 16.00M vmem.")

    with pytest.raises(RuntimeError, match="vmem"):  # a smaller batch needs as much vmem
        plan.run([*words, "full"], compile_one=fail)


def test_search_compiles_the_layouts_in_its_flags(model: str, capsys: pytest.CaptureFixture) -> None:
    choices = [(each.batch_size, each.remat) for each in planned(model, "--search true --compiles 5")]
    assert choices == [(8, "none"), (8, "full"), (8, "dots"), (4, "none"), (4, "full")]
    assert capsys.readouterr().out.count("--mesh data=1,fsdp=1 --remat") == 5
    named = planned(model, "--meshes fsdp=1 tensor=1 --batch_sizes 2")
    assert [each.batch_size for each in named] == [2] * 6


@pytest.fixture
def trace_requests(monkeypatch: pytest.MonkeyPatch) -> list[StepRequest]:
    """Return the requests to trace a program; tracing is replaced."""
    requests: list[StepRequest] = []

    def trace(request: StepRequest) -> TracedProgram:
        requests.append(request)
        return TracedProgram(b"", (), (), 1)

    monkeypatch.setattr(synthetic, "TRAIN_NUMBER_PAIRS", 64)  # saves tokenization time
    monkeypatch.setattr(plan, "check_libraries", lambda: None)
    monkeypatch.setattr(layouts, "trace_step", trace)
    monkeypatch.setattr(layouts, "compile_for", lambda traced, topology, whole: CompiledProgram(1, 1, 1, 1))
    return requests


@pytest.mark.parametrize(("packing", "rows", "length"), [("auto", 3, 64), ("false", None, 64)])
def test_rankings_are_planned_with_all_answers(packing: str, rows: Any, length: int, trace_requests: Any) -> None:
    words = ["--model_name_or_path", "synthetic:tiny", "--dataset_name", "synthetic:rankings", "--packing", packing]
    assert plan.run([*words, *WORDS]) == 0
    assert [(each.token_rows, each.length, each.answers) for each in trace_requests] == [(rows, length, 4)]
    (layout,) = planned(words[1], " ".join(words[2:]))
    assert layout.shape == BatchShape(rows or 8 * 4, length)  # 8 prompts


@pytest.mark.parametrize("packing", ["true", "false"])
def test_process_rewards_and_attributes_are_planned_as_trained(
    packing: str, tmp_path: Path, trace_requests: list[StepRequest], capsys: pytest.CaptureFixture
) -> None:
    solutions(20).to_json(tmp_path / "steps.jsonl")
    words = [*WORDS, "--model_name_or_path", "synthetic:tiny", "--packing", packing]
    words += ["--per_device_train_batch_size", "4", "--max_shapes", "1"]  # compiles one program
    of_steps = ["prm", *words, "--step_separator", " "]
    assert plan.run([*words, "--attributes", "helpful", "brief", "--max_length", "64"]) == 0
    assert plan.run(of_steps) == plan.run([*of_steps, "--dataset_name", str(tmp_path / "steps.jsonl")]) == 0
    assert [each.model.num_labels for each in trace_requests] == [2, 2, 2]
    wanted = [HeadSpec({"helpful": 0.5, "brief": 0.5}), HeadSpec({}, " "), HeadSpec({}, " ")]
    assert [HeadSpec.of(each.model) for each in trace_requests] == wanted
    assert [each.answers for each in trace_requests] == [2, 2, 5]  # without data, the fewest that can be compared
    rows = re.findall(r"4 rows of the data in (\d+) token rows of", capsys.readouterr().err)
    assert rows == (["8", "4", "4"] if packing == "false" else ANY)  # one solution per row


def test_training_yaml_is_traced_unchanged(model: str, tmp_path: Path, trace_requests: list[StepRequest]) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(
        f"model_name_or_path: {model}\nper_device_train_batch_size: 2\nmax_length: 200\nlearning_rate: 2.0e-3\n"
        "gradient_accumulation_steps: 2\n"
    )
    assert plan.run(["--config", str(config), *WORDS, "--remat", "none"]) == 0
    (request,) = trace_requests
    # two sequences of 200 tokens that share 100, in a row length that is a multiple of 128
    assert (request.token_rows, request.length, request.dtype) == (2, 384, "float32")
    given = request.arguments
    assert (given["learning_rate"], given["remat"], given["gradient_accumulation_steps"]) == (2e-3, "none", 2)
    assert not {"gradient_checkpointing", "topology", "model_name_or_path"} & set(given)


def test_dataset_and_adapters_are_planned_without_weights(model: str, capsys: pytest.CaptureFixture) -> None:
    (layout,) = planned("synthetic:tiny", "--dataset_name synthetic:numbers --max_length 16 --bf16 false")
    # a sequence has 13 tokens, and answers differ in the last two
    assert set(layout.lengths.sizes_N.tolist()) == {15}
    assert "6,144 rows" in capsys.readouterr().out
    (layout,) = planned(model, "--use_peft true --lora_r 4 --lora_target_modules q_proj v_proj")
    adapters = 2 * 2 * (256 * 4 + 4 * 256)
    assert layout.model.trained_parameters == adapters + 256  # and the score head
    assert all(parameter.device.type == "meta" for parameter in layout.module.parameters())


def test_missing_model_is_rejected(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--model_name_or_path"):
        plan.run(WORDS, compile_one=compiled)
    for missing, more in ((str(tmp_path / "gone"), ""), (model, "--dataset_name synthetic:numbers")):
        with pytest.raises(UserError, match=f"{missing} "):
            planned(missing, more)


def test_plan_rejects_several_slices(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "default_mesh", lambda *_, **__: ("fsdp=-1", 4, 1))  # 4 chips
    with pytest.raises(UserError, match="v6e:2x2 is one slice"):
        planned(model, "--topology v6e:2x2 --mesh slices=2,fsdp=-1")


# ---- layouts: bounds by arithmetic, the report, and compiled layouts of a search


@pytest.fixture(scope="module")
def layout() -> Layout:
    """Return the layout of a Llama with 1.2 billion parameters, without weights, on 16 chips."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    config = AutoConfig.for_model("llama", num_attention_heads=32, num_key_value_heads=8, **sizes)
    args = RewardConfig("unused", report_to="none", use_cpu=True, bf16=True)
    model, lengths = model_without_weights(config, "float32"), RowLengths.of_size(2048)
    return Layout(model, args, lengths, None, parse_topology("v6e:4x4"), MeshShape(fsdp=16), Remat.FULL, 2)


def test_times_follow_from_operations_and_bytes_at_published_speeds(layout: Layout) -> None:
    largest, usual = compiled(layout, flops=180e12), compiled(layout, flops=90e12, moved=32.8e9)
    seconds = Attempt(layout, largest, usual).seconds
    assert seconds == {"arithmetic": 90e12 / 918e12, "links": 4e9 / 400e9, "memory": 32.8e9 / 1640e9}
    # the compiler ignores operations of kernels and counts loops once: a step needs at least the model's operations
    least = layout.training_flops / 16
    assert Attempt(layout, usual=compiled(layout, flops=0.0)).seconds["arithmetic"] == least / 918e12
    assert Attempt(layout, usual=compiled(layout)).most_rows_per_second == 32 / max(4e9 / 400e9, least / 918e12)


def test_received_bytes_count_each_channel_once() -> None:
    lines = [
        " %a = bf16[8,128]{1,0:T(8,128)} all-gather(%x), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}",
        " %again = bf16[8,128]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}",
        " %b = (f32[100]{0}, f32[]) all-reduce(%y, %z), channel_id=2, replica_groups=[2,4]<=[8], to_apply=%add",
        " %c = f32[25]{0} reduce-scatter(%y), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}",
        " %d = (s8[64], s8[64], u32[], u32[]) collective-permute-start(%w), channel_id=4, source_target_pairs={{0,1}}",
        " %e = f32[8] add(%b, %c), metadata={op_name=all-gather}",
    ]
    assert received("\n".join(lines)) == 2 * 8 * 128 / 2 + 4 * 101 * 3 / 4 + 4 * 25 * 4 * 3 / 4 + 64
    results = (
        "  %a = (f32[100]{0:T(128)}, bf16[50]{0:T(128)S(1)}) fusion(%p), kind=kLoop\n  %b = f32[9]{0} parameter(0)"
    )
    assert moved(f"%called {{\n  %c = f32[7] add(%d)\n}}\nENTRY %main {{\n{results}\n}}") == 2 * 4 * 100


def test_child_process_error_states_reason_or_signal() -> None:
    with pytest.raises(RuntimeError, match="status -6"):
        call_in_child(os.abort, environment={})
    with pytest.raises(RuntimeError, match="TypeError: .* not int"):
        call_in_child(Path, 4, environment={})
    assert call_in_child(Path, "given", environment={}) == Path("given")


# ---- deep models


def tiny(model_type: str, layers: int, **settings: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64, "num_labels": 1}
    return AutoConfig.for_model(model_type, num_hidden_layers=layers, **sizes, **settings)


def test_deep_models_compile_two_depths_of_whole_periods() -> None:
    assert depths_of(tiny("llama", 24)) == (24,)
    assert depths_of(tiny("llama", 80), compiles_all=True) == (80,)
    assert depths_of(tiny("llama", 32)) == (2, 4)
    assert depths_of(tiny("llama", 35)) == (3, 5)
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 10
    assert depths_of(tiny("gemma3_text", 26, layer_types=kinds[:26])) == (8, 14)
    assert depths_of(tiny("gemma3_text", 60, layer_types=kinds)) == (6, 12)

    def program(layers: int) -> CompiledProgram:
        return CompiledProgram(10 + 3 * layers, 1, 1000 + 7 * layers, 5 + layers, 2.0 * layers, 8.0 + layers)

    assert extrapolate([program(4), program(8)], (4, 8), 48) == program(48)
    assert extrapolate([program(8)], (8,), 8) == program(8)
    assert extrapolate([program(8), replace(program(4), results=0)], (4, 8), 480).results == 0
    assert min(astuple(extrapolate([program(8), program(4)], (4, 8), 4800))) == 0
    whole = tiny("gemma3_text", 12, layer_types=["sliding_attention", "full_attention"] * 6, head_dim=8)
    assert len(AutoModelForSequenceClassification.from_config(layouts.with_layers(whole, 4)).model.layers) == 4
    assert whole.num_hidden_layers == len(whole.layer_types) == 12


def test_fastest_layout_that_fits_comes_first(layout: Layout) -> None:
    def tried(fsdp: int, **changes: float) -> Attempt:
        return Attempt(replace(layout, mesh=MeshShape(fsdp=fsdp)), *[compiled(layout, **changes)] * 2)

    attempts = [tried(1, temporary=40 * GiB), tried(2, received=8e10), tried(16, received=4e10)]
    rows = layouts.found(attempts).splitlines()[1:4]
    assert ["fsdp=16 " in rows[0], "fsdp=2 " in rows[1]] == [True, True]
    assert [row.count("FITS") for row in rows] == [1, 1, 0]
