"""The command ``trl-tpu plan``: from flags and YAML to what is compiled and printed, with a made-up compiler."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from made_programs import REFUSAL, compiled
from places import SUPPORT
from transformers import AutoConfig

from trl_tpu.errors import UserError
from trl_tpu.parallel.chips import GiB, parse_topology
from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.plan.case import Case
from trl_tpu.plan.compile import CompiledProgram
from trl_tpu.scripts import plan_command, plan_request
from trl_tpu.scripts.plan_command import pairs_to_train
from trl_tpu.scripts.plan_job import job_of
from trl_tpu.scripts.plan_request import PlanRequest

FLAGS = "--report_to none --topology v6e:1x1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with nothing but a config."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    AutoConfig.for_model("llama", num_attention_heads=4, **sizes).save_pretrained(folder)
    return str(folder)


parser = cache(plan_request.make_parser)


def asked(model: str, more: str = "", mesh: MeshShape | None = None) -> PlanRequest:
    """The arguments; on plain torch there is one device, so another mesh is put in their place."""
    parsed = plan_request.parse(parser(), ["--model_name_or_path", model, *FLAGS.split(), *more.split()])
    if mesh is not None:
        parsed.training.mesh_shape = mesh
    return parsed


def test_a_config_alone_is_planned_and_the_text_printed(model: str, capsys: pytest.CaptureFixture) -> None:
    seen: list[Case] = []

    def compile_step(case: Case) -> CompiledProgram:
        seen.append(case)
        return compiled(case)

    words = "--per_device_train_batch_size 4 --row_length 512 --pairs_in_dataset 1000 --remat dots"
    assert plan_command.main(asked(model, words), compile_step) == 0
    (case,) = seen
    assert (case.pairs, case.shape, case.remat, case.job.compute_bytes) == (4, (4, 512), "dots", 4)
    assert case.masks
    printed = capsys.readouterr()
    assert "IT FITS" in printed.out
    assert "3,000 pairs: at least" in printed.out  # transformers' default of epochs is 3
    assert "every pair is taken to have 512 unique tokens" in printed.out
    assert "Compiling for v6e:1x1" in printed.err


def test_the_number_of_steps_goes_before_the_dataset(model: str, capsys: pytest.CaptureFixture) -> None:
    words = "--max_steps 10 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --pairs_in_dataset 9000"
    assert plan_command.main(asked(model, words), compiled) == 0
    out = capsys.readouterr().out
    assert "80 pairs: at least" in out
    assert "2 such passes before each update" in out


def test_json_has_the_figures_and_nothing_else_is_printed(model: str, capsys: pytest.CaptureFixture) -> None:
    assert plan_command.main(asked(model, "--json true --price_per_chip_hour 2"), compiled) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] is True
    assert said["topology"] == "v6e:1x1"
    assert sum(said["memory_by_kind"].values()) == said["memory"]["peak"]
    assert said["tried"] == []


def test_what_does_not_fit_is_followed_by_what_would(model: str, capsys: pytest.CaptureFixture) -> None:
    def compile_step(case: Case) -> CompiledProgram:
        if case.pairs > 2:
            raise RuntimeError(REFUSAL)
        return compiled(case)

    words = "--per_device_train_batch_size 8 --remat dots --row_length 512"
    assert plan_command.main(asked(model, words), compile_step) == 1
    out = capsys.readouterr().out
    assert "IT DOES NOT FIT: the compiler gave up at 49.2" in out
    assert out.index("What would fit:") < out.index("too much for 31.25 GiB") or "FITS the" in out
    assert plan_command.main(asked(model, f"{words} --json true"), compile_step) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] is False
    assert 0 < len(said["tried"]) <= 6


def test_a_program_that_is_made_but_too_large_has_its_report_too(model: str, capsys: pytest.CaptureFixture) -> None:
    def compile_step(case: Case) -> CompiledProgram:
        return compiled(case, temporary=40 * GiB if case.pairs > 1 else GiB)

    assert plan_command.main(asked(model, "--per_device_train_batch_size 2"), compile_step) == 1
    out = capsys.readouterr().out
    assert "IT DOES NOT FIT: 40.0" in out
    assert "Memory of a chip" in out


def test_a_search_prints_flags_to_use(model: str, capsys: pytest.CaptureFixture) -> None:
    assert plan_command.main(asked(model, "--search true --compiles 2"), compiled) == 0
    out = capsys.readouterr().out
    assert out.count("--mesh data=1,fsdp=1 --remat") == 2
    assert plan_command.main(asked(model, "--search true --compiles 2 --json true"), compiled) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["attempts"]) == 2


def test_a_training_yaml_is_planned_as_it_is(model: str, tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(
        f"model_name_or_path: {model}\nper_device_train_batch_size: 2\nmax_length: 200\nlearning_rate: 2.0e-3\n"
        "gradient_accumulation_steps: 2\n"
    )
    parsed = plan_request.parse(
        plan_request.make_parser(), ["--config", str(config), "--topology", "v6e:1x1", "--remat", "none"]
    )
    assert parsed.words["learning_rate"] == 2e-3
    assert parsed.words["remat"] == "none"
    assert "gradient_checkpointing" not in parsed.words
    job = job_of(parsed, str(tmp_path))
    assert job.accumulation == 2
    # two dialogues of 200 tokens that share half of one, in a row that is a multiple of 128
    assert job.shape(2, 1) == (2, 384)
    case = Case(job, parse_topology("v6e:1x1"), MeshShape(), "none", 2)
    assert pairs_to_train(parsed, case) is None


def test_a_named_dataset_gives_lengths_and_pairs(tmp_path: Path) -> None:
    words = "--model_name_or_path synthetic:tiny --dataset_name synthetic:numbers --max_length 16 --bf16 false"
    parsed = plan_request.parse(
        plan_request.make_parser(), [*words.split(), "--topology", "v6e:1x1", "--report_to", "none"]
    )
    job = job_of(parsed, str(tmp_path))
    assert len(job.lengths) == 2048
    assert job.compute_bytes == 4
    # a dialogue has 13 tokens, and the answers differ in the last two
    assert set(job.lengths.sizes_P.tolist()) == {15}
    case = Case(job, parse_topology("v6e:1x1"), MeshShape(), "none", 2)
    assert pairs_to_train(parsed, case) == 3 * 2048


def test_adapters_are_planned_without_weights(model: str, tmp_path: Path) -> None:
    job = job_of(asked(model, "--use_peft true --lora_r 4 --lora_target_modules q_proj v_proj"), str(tmp_path))
    adapters = 2 * 2 * (256 * 4 + 4 * 256)
    assert job.model.trained_parameters == adapters + 256  # and the score head
    assert all(parameter.device.type == "meta" for parameter in job.module.parameters())


def test_padded_batches_have_two_rows_a_pair_and_masks(model: str, tmp_path: Path) -> None:
    job = job_of(asked(model, "--packing false --max_length 300"), str(tmp_path))
    assert job.shape(4, 2) == (8, 300)
    assert job.keeps_scores(300) and job.keeps_scores(4096)


def test_rows_that_are_asked_for_hold_all_pairs_of_a_batch(model: str, tmp_path: Path) -> None:
    words = "--row_length 512 --per_device_train_batch_size 4 --rows"
    job = job_of(asked(model, f"{words} 2"), str(tmp_path))
    assert job.lengths.sizes_P.tolist() == [256]
    assert job.shape(4, 1) == (2, 512)
    assert job.shape(16, 4) == (8, 512)
    with pytest.raises(UserError, match="rows=3 go over 2 parts"):
        job_of(asked(model, f"{words} 3", MeshShape(fsdp=2)), str(tmp_path))


@pytest.mark.parametrize("more", ["--dataset_name synthetic:numbers", "--packing false"])
def test_rows_where_none_are_made_up_are_refused(model: str, more: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`rows` is how many packed rows a batch of made-up pairs has. Leave it out"):
        job_of(asked(model, f"--rows 2 {more}"), str(tmp_path))


def test_long_rows_have_no_masks(model: str, tmp_path: Path) -> None:
    assert not job_of(asked(model, ""), str(tmp_path)).keeps_scores(4096)
    assert job_of(asked(model, "--packed_attention masks"), str(tmp_path)).keeps_scores(4096)


def test_several_slices_and_no_model_are_refused(model: str) -> None:
    with pytest.raises(UserError, match="v6e:1x1 is one slice"):
        plan_command.main(asked(model, "", MeshShape(data=2, slices=2)), compiled)
    parsed = asked(model)
    parsed.model.model_name_or_path = None
    with pytest.raises(UserError, match="Name a model"):
        plan_command.main(parsed, compiled)


def test_a_model_or_tokenizer_that_is_not_there_is_named(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone cannot be loaded as a reward model: there is no folder .*gone. Correct"):
        plan_command.main(asked(str(tmp_path / "gone")), compiled)
    with pytest.raises(UserError, match=f"{model} cannot be loaded as a tokenizer: "):
        plan_command.main(asked(model, "--dataset_name synthetic:numbers"), compiled)


# ---- for more chips than there are devices

SCRIPT = """
import sys
from trl_tpu.scripts import plan
plan.pretend_devices(sys.argv[1:])
from made_programs import compiled
from trl_tpu.scripts import plan_command, plan_request
raise SystemExit(plan_command.main(plan_request.parse(plan_request.make_parser(), sys.argv[1:]), compiled))
"""


def command(*words: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PJRT", "CPU_NUM", "USE_"))}
    root = str(Path(plan_command.__file__).parents[2])
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": f"{root}:{SUPPORT}", "HF_HUB_OFFLINE": "1"},
        cwd=root,
    )


@pytest.mark.long  # `make tpu-check` runs the command, too
def test_a_mesh_is_checked_against_the_slices_chips(model: str) -> None:
    words = ["--model_name_or_path", model, "--topology", "v6e:4x4", "--mesh", "data=2,fsdp=-1,tensor=2", "--json"]
    done = command(sys.executable, "-c", SCRIPT, *words, "true")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["mesh"] == {"data": 2, "fsdp": 4, "tensor": 2}
    assert said["chips"] == 16
    assert set(said["traffic"]) == {"data", "fsdp", "tensor"}


def test_mistakes_end_the_command_with_one_line(model: str) -> None:
    done = command(sys.executable, "-m", "trl_tpu.cli", "plan", "--model_name_or_path", model, "--topology", "v6e:5x5")
    assert done.returncode == 2
    assert done.stderr.strip().startswith("trl-tpu plan: error: topology 'v6e:5x5': slices of v6e have the shapes 1x1")
