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
from planned import REFUSAL, compiled
from stepwise import solutions
from transformers import AutoConfig, dynamic_module_utils

from trl_tpu.errors import UserError
from trl_tpu.modeling.outputs import Outputs
from trl_tpu.modeling.packability import reads_padding
from trl_tpu.plan import layouts
from trl_tpu.plan.compile import CompiledProgram, TracedProgram, call_in_child
from trl_tpu.plan.layouts import Layout
from trl_tpu.plan.trace import StepRequest
from trl_tpu.scripts import plan


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with nothing but a config."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    AutoConfig.for_model("llama", num_attention_heads=4, **sizes).save_pretrained(folder)
    return str(folder)


def planned(model: str, more: str = "") -> list[Layout]:
    """What is compiled."""
    seen: list[Layout] = []

    def compile_one(layout: Layout) -> CompiledProgram:
        seen.append(layout)
        return compiled(layout)

    words = ["--model_name_or_path", model, "--report_to", "none", "--topology", "v6e:1x1", *more.split()]
    assert plan.main(words, compile_one) == 0
    return seen


def test_a_config_alone_is_planned_and_the_text_printed(model: str, capsys: pytest.CaptureFixture) -> None:
    words = "--per_device_train_batch_size 4 --row_length 512 --pairs_in_dataset 1000 --remat dots"
    (layout,) = planned(model, words)
    assert (layout.pairs, layout.shape, layout.remat) == (4, (4, 512), "dots")
    printed = capsys.readouterr()
    assert "IT FITS" in printed.out
    assert "3,000 pairs: at least" in printed.out  # transformers' default of epochs is 3
    assert "1 pairs of 512 unique tokens" in printed.out
    assert "Compiling for v6e:1x1" in printed.err
    planned(model, f"{words} --max_steps 10 --gradient_accumulation_steps 2")
    assert "80 pairs: at least" in capsys.readouterr().out  # of the steps, whatever the dataset has


def test_what_does_not_fit_is_followed_by_what_would(model: str, capsys: pytest.CaptureFixture) -> None:
    seen: list[tuple[str, str, int]] = []

    def compile_one(layout: Layout) -> CompiledProgram:
        seen.append((str(layout.mesh), layout.remat, layout.pairs_per_device))
        if layout.pairs_per_device > 2:
            raise RuntimeError(REFUSAL)
        return compiled(layout)

    words = f"--model_name_or_path {model} --report_to none --topology v6e:1x1 --per_device_train_batch_size 8 --remat"
    assert plan.main([*words.split(), "dots"], compile_one) == 1
    one_chip = "data=1,fsdp=1"
    assert seen == [(one_chip, "dots", 8), *((one_chip, "full", pairs) for pairs in (8, 4, 2))]
    out = capsys.readouterr().out
    assert out.index("IT DOES NOT FIT") < out.index("What would fit:") < out.index("--per_device_train_batch_size 2")
    seen.clear()
    assert plan.main([*words.split(), "full", "--compiles", "1"], compile_one) == 1
    assert seen == [(one_chip, "full", 8), (one_chip, "full", 4)]
    assert "None of these fits" in capsys.readouterr().out


def test_a_search_compiles_what_its_flags_name_and_prints_flags_to_use(
    model: str, capsys: pytest.CaptureFixture
) -> None:
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
def test_rankings_are_planned_with_all_their_answers(
    packing: str, rows: int | None, length: int, traced: list[StepRequest]
) -> None:
    words = "--topology v6e:1x1 --model_name_or_path synthetic:tiny --dataset_name synthetic:rankings --report_to none"
    assert plan.main([*words.split(), "--packing", packing]) == 0
    assert [(each.rows, each.length, each.answers) for each in traced] == [(rows, length, 4)]
    (layout,) = planned("synthetic:tiny", f"--dataset_name synthetic:rankings --packing {packing}")
    assert layout.shape == (rows or 8 * 4, length)  # of 8 prompts


@pytest.mark.parametrize("packing", ["true", "false"])
def test_steps_and_attributes_are_planned_as_they_train(
    packing: str, tmp_path: Path, traced: list[StepRequest], capsys: pytest.CaptureFixture
) -> None:
    solutions(20).to_json(tmp_path / "steps.jsonl")
    words = ["--topology", "v6e:1x1", "--model_name_or_path", "synthetic:tiny", "--report_to", "none"]
    words += ["--packing", packing, "--per_device_train_batch_size", "4"]
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
    assert plan.main(["--config", str(config), "--topology", "v6e:1x1", "--remat", "none"]) == 0
    (request,) = traced
    # two dialogues of 200 tokens that share half of one, in a row that is a multiple of 128
    assert (request.rows, request.length, request.dtype) == (2, 384, "float32")
    given = request.arguments
    assert (given["learning_rate"], given["remat"], given["gradient_accumulation_steps"]) == (2e-3, "none", 2)
    assert not {"gradient_checkpointing", "topology", "model_name_or_path"} & set(given)


def test_a_named_dataset_gives_lengths_and_pairs(capsys: pytest.CaptureFixture) -> None:
    (layout,) = planned("synthetic:tiny", "--dataset_name synthetic:numbers --max_length 16 --bf16 false")
    # a dialogue has 13 tokens, and the answers differ in the last two
    assert set(layout.lengths.sizes_P.tolist()) == {15}
    assert "6,144 pairs: at least" in capsys.readouterr().out


def test_adapters_are_planned_without_weights(model: str) -> None:
    (layout,) = planned(model, "--use_peft true --lora_r 4 --lora_target_modules q_proj v_proj")
    adapters = 2 * 2 * (256 * 4 + 4 * 256)
    assert layout.model.trained_parameters == adapters + 256  # and the score head
    assert all(parameter.device.type == "meta" for parameter in layout.module.parameters())


def test_a_model_that_is_not_named_or_not_there_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Name a model"):
        plan.main(["--topology", "v6e:1x1", "--report_to", "none"], compiled)
    with pytest.raises(UserError, match="gone cannot be loaded as a reward model"):
        planned(str(tmp_path / "gone"))
    with pytest.raises(UserError, match=f"{model} cannot be loaded as a tokenizer: "):
        planned(model, "--dataset_name synthetic:numbers")


@pytest.fixture
def own_code(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of a model that brings its code, which transformers copies to a cache."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(
        "from torch.nn import Linear\n"
        "from transformers import LlamaConfig, LlamaModel, LlamaPreTrainedModel\n"
        "class OwnConfig(LlamaConfig):\n"
        "    model_type = 'own'\n"
        "class OwnForSequenceClassification(LlamaPreTrainedModel):\n"
        "    config_class = OwnConfig\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.model = LlamaModel(config)\n"
        "        self.score = Linear(config.hidden_size, config.num_labels, bias=False)\n"
        "        self.post_init()\n"
    )
    config = json.loads(Path(model, "config.json").read_text()) | {"model_type": "own"}
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForSequenceClassification": "own.OwnForSequenceClassification",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_model_with_code_of_its_own_is_planned_where_that_is_trusted(
    own_code: str, model: str, traced: list[StepRequest]
) -> None:
    with pytest.raises(UserError, match="trust_remote_code"):
        planned(own_code)
    (layout,) = planned(own_code, "--trust_remote_code true")
    assert type(layout.module).__name__ == "OwnForSequenceClassification"
    words = ["--model_name_or_path", own_code, "--report_to", "none", "--topology", "v6e:1x1"]
    assert plan.main([*words, "--trust_remote_code", "true"]) == 0
    (request,) = traced
    assert request.arguments["trust_remote_code"] is True
    assert call_in_child(getattr, request.model, "model_type", environment={}) == "own"  # the child finds the class
    (layout,) = planned(model)
    assert reads_padding(layout.module, 0)  # what the trainer asks of such code; here there are no weights


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--topology v6e:4x4 --mesh fsdp=3", "mesh 'fsdp=3': "),
        pytest.param(
            *("--topology v6e:2x2 --mesh slices=2,fsdp=-1", "v6e:2x2 is one slice"),
            marks=pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed"),
        ),
    ],
)
def test_mistakes_end_the_command_with_one_line(model: str, words: str, error: str) -> None:
    """A mesh is checked against the slice's chips."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PJRT", "CPU_NUM", "USE_"))}
    command = [sys.executable, "-m", "trl_tpu.cli", "plan", "--model_name_or_path", model, *words.split()]
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, "--report_to", "none"], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert error in done.stderr.strip().splitlines()[-1]
