"""The command ``trl-tpu plan``: from flags and YAML to what is compiled and printed, with a made-up compiler."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import ANY

import pytest
from places import ROOT
from planned import REFUSAL, compiled, layouts_of, save_config
from stepwise import solutions
from transformers import dynamic_module_utils

from trl_tpu.errors import UserError
from trl_tpu.modeling.outputs import Outputs
from trl_tpu.plan import layouts
from trl_tpu.plan.compile import CompiledProgram, TracedProgram, call_in_child
from trl_tpu.plan.layouts import Layout
from trl_tpu.plan.trace import StepRequest
from trl_tpu.scripts import plan

WORDS = ["--report_to", "none", "--topology", "v6e:1x1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_config(folder)
    return str(folder)


def planned(model: str, more: str = "") -> list[Layout]:
    return layouts_of("--model_name_or_path", model, *WORDS, *more.split())


def test_a_config_alone_is_planned_and_the_text_printed(model: str, capsys: pytest.CaptureFixture) -> None:
    words = "--per_device_train_batch_size 4 --row_length 512 --pairs_in_dataset 1000 --remat dots"
    (layout,) = planned(model, words)
    assert (layout.pairs, layout.shape, layout.remat) == (4, (4, 512), "dots")
    printed = capsys.readouterr().out
    assert "IT FITS" in printed and "1 pairs of 512 unique tokens" in printed
    assert "3,000 pairs" in printed  # transformers' default of epochs is 3
    planned(model, f"{words} --max_steps 10 --gradient_accumulation_steps 2")
    assert "80 pairs" in capsys.readouterr().out  # of the steps, whatever the dataset has


def test_what_does_not_fit_is_followed_by_what_would(model: str, capsys: pytest.CaptureFixture) -> None:
    seen: list[tuple[str, str, int]] = []

    def compile_one(layout: Layout) -> CompiledProgram:
        seen.append((str(layout.mesh), layout.remat, layout.pairs_per_device))
        if layout.pairs_per_device > 2:
            raise RuntimeError(REFUSAL)
        return compiled(layout)

    words = ["--model_name_or_path", model, *WORDS, "--per_device_train_batch_size", "8", "--remat"]
    assert plan.main([*words, "dots"], compile_one) == 1
    one_chip = "data=1,fsdp=1"
    assert seen == [(one_chip, "dots", 8), *((one_chip, "full", pairs) for pairs in (8, 4, 2))]
    printed = capsys.readouterr().out
    assert printed.index("IT DOES NOT FIT") < printed.index("--per_device_train_batch_size 2")
    seen.clear()
    assert plan.main([*words, "full", "--compiles", "1"], compile_one) == 1
    assert seen == [(one_chip, "full", 8), (one_chip, "full", 4)]


def test_a_search_compiles_what_its_flags_name(model: str, capsys: pytest.CaptureFixture) -> None:
    choices = [(each.pairs, each.remat) for each in planned(model, "--search true --compiles 5")]
    assert choices == [(8, "none"), (8, "full"), (8, "dots"), (4, "none"), (4, "full")]
    assert capsys.readouterr().out.count("--mesh data=1,fsdp=1 --remat") == 5
    named = planned(model, "--meshes fsdp=1 tensor=1 --batch_sizes 2")
    assert [each.pairs for each in named] == [2] * 6
    for words in ("--batch_sizes 0", "--compiles 0"):
        with pytest.raises(UserError, match=words.split()[-2].lstrip("-")):
            planned(model, words)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[StepRequest]:
    """What is asked to be traced, of which nothing is."""
    requests: list[StepRequest] = []

    def trace(request: StepRequest) -> TracedProgram:
        requests.append(request)
        return TracedProgram(b"", (), (), 1)

    monkeypatch.setattr(plan, "missing", lambda: None)
    monkeypatch.setattr(layouts, "trace_step", trace)
    monkeypatch.setattr(layouts, "compile_for", lambda traced, topology: CompiledProgram(1, 1, 1, 1))
    return requests


@pytest.mark.parametrize(("packing", "rows", "length"), [("auto", 3, 64), ("false", None, 17)])
def test_rankings_are_planned_whole(packing: str, rows: int | None, length: int, traced: list[StepRequest]) -> None:
    words = ["--model_name_or_path", "synthetic:tiny", "--dataset_name", "synthetic:rankings", "--packing", packing]
    assert plan.main([*words, *WORDS]) == 0
    assert [(each.rows, each.length, each.answers) for each in traced] == [(rows, length, 4)]
    (layout,) = planned(words[1], " ".join(words[2:]))
    assert layout.shape == (rows or 8 * 4, length)  # of 8 prompts


@pytest.mark.parametrize("packing", ["true", "false"])
def test_steps_and_attributes_are_planned_as_they_train(
    packing: str, tmp_path: Path, traced: list[StepRequest], capsys: pytest.CaptureFixture
) -> None:
    solutions(20).to_json(tmp_path / "steps.jsonl")
    words = [*WORDS, "--model_name_or_path", "synthetic:tiny", "--packing", packing]
    words += ["--per_device_train_batch_size", "4"]
    of_steps = ["prm", *words, "--step_separator", " "]
    assert plan.main([*words, "--attributes", "helpful", "brief", "--max_length", "64"]) == 0
    assert plan.main(of_steps) == plan.main([*of_steps, "--dataset_name", str(tmp_path / "steps.jsonl")]) == 0
    assert [each.model.num_labels for each in traced] == [2, 2, 2]
    wanted = [Outputs({"helpful": 0.5, "brief": 0.5}), Outputs({}, " "), Outputs({}, " ")]
    assert [Outputs.of(each.model) for each in traced] == wanted
    assert [each.answers for each in traced] == [2, 2, 5]  # without data, as few as can be compared
    rows = re.findall(r"4 pairs in (\d+) rows of", capsys.readouterr().err)
    assert rows == (["8", "4", "4"] if packing == "false" else ANY)  # a solution is a row


def test_a_training_yaml_is_traced_as_it_is(model: str, tmp_path: Path, traced: list[StepRequest]) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(
        f"model_name_or_path: {model}\nper_device_train_batch_size: 2\nmax_length: 200\nlearning_rate: 2.0e-3\n"
        "gradient_accumulation_steps: 2\n"
    )
    assert plan.main(["--config", str(config), *WORDS, "--remat", "none"]) == 0
    (request,) = traced
    # two dialogues of 200 tokens that share half of one, in a row that is a multiple of 128
    assert (request.rows, request.length, request.dtype) == (2, 384, "float32")
    given = request.arguments
    assert (given["learning_rate"], given["remat"], given["gradient_accumulation_steps"]) == (2e-3, "none", 2)
    assert not {"gradient_checkpointing", "topology", "model_name_or_path"} & set(given)


def test_a_named_dataset_and_adapters_are_planned_without_weights(model: str, capsys: pytest.CaptureFixture) -> None:
    (layout,) = planned("synthetic:tiny", "--dataset_name synthetic:numbers --max_length 16 --bf16 false")
    # a dialogue has 13 tokens, and the answers differ in the last two
    assert set(layout.lengths.sizes_P.tolist()) == {15}
    assert "6,144 pairs" in capsys.readouterr().out
    (layout,) = planned(model, "--use_peft true --lora_r 4 --lora_target_modules q_proj v_proj")
    adapters = 2 * 2 * (256 * 4 + 4 * 256)
    assert layout.model.trained_parameters == adapters + 256  # and the score head
    assert all(parameter.device.type == "meta" for parameter in layout.module.parameters())


def test_a_model_that_is_not_named_or_not_there_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--model_name_or_path"):
        plan.main(WORDS, compiled)
    for missing, more in ((str(tmp_path / "gone"), ""), (model, "--dataset_name synthetic:numbers")):
        with pytest.raises(UserError, match=f"{missing} "):
            planned(missing, more)


OWN_CODE = """
from torch.nn import Linear
from transformers import LlamaConfig, LlamaModel, LlamaPreTrainedModel
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaPreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.model, self.score = LlamaModel(config), Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
"""


def test_a_model_with_code_of_its_own_is_planned_where_that_is_trusted(
    model: str, traced: list[StepRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers copies the code to a cache; the child process that traces finds the class."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnModel"}
    config = json.loads(Path(model, "config.json").read_text()) | {"model_type": "own", "auto_map": classes}
    own = tmp_path / "own"
    own.mkdir()
    (own / "own.py").write_text(OWN_CODE)
    (own / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="trust_remote_code"):
        planned(str(own))
    (layout,) = planned(str(own), "--trust_remote_code true")
    assert type(layout.module).__name__ == "OwnModel"
    assert plan.main(["--model_name_or_path", str(own), *WORDS, "--trust_remote_code", "true"]) == 0
    (request,) = traced
    assert request.arguments["trust_remote_code"] is True
    assert call_in_child(getattr, request.model, "model_type", environment={}) == "own"


@pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed")
def test_a_mesh_is_checked_against_the_chips_of_the_slice(model: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PJRT", "CPU_NUM", "USE_"))}
    words = ["plan", "--model_name_or_path", model, "--report_to", "none", "--topology", "v6e:2x2"]
    command = [sys.executable, "-m", "trl_tpu.cli", *words, "--mesh", "slices=2,fsdp=-1"]
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "v6e:2x2 is one slice" in done.stderr.strip().splitlines()[-1]
