"""The command line: quick help, runtime report, training from flags and YAML, scoring, and the check of a device."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import preference_rows
import pytest
import subprocesses
from environment import ROOT

import trl_tpu
from trl_tpu import cli
from trl_tpu.compat.arguments import REMOVED
from trl_tpu.config.reward_config import RewardConfig
from trl_tpu.scripts import plan, reward, selfcheck, synthetic
from trl_tpu.trainer.model_config import ModelConfig

TEXTS = ["one", "a much longer text than the other ones", "two words", "ends itself<|end|>", "x"]
HELD_OUT = ("accuracy", "loss", "margin", "mean_reward", "min_reward", "max_reward")


def rewards_of(folder: Path | str, dialogues: Sequence[Any]) -> list[float | None]:
    return [row["reward"] for row in trl_tpu.score(str(folder), dialogues)]


def test_help_names_the_commands_and_imports_nothing_heavy() -> None:
    heavy = {"torch", "torch_xla", "transformers", "datasets", "jax", "trl"}
    code = f"import sys; from trl_tpu.cli import main; main([]); print({heavy} & set(sys.modules))"
    said = subprocesses.run_without_server("-c", code)
    assert said.splitlines()[-1] == "set()" and all(re.search(rf"^    {name}\s", said, re.M) for name in cli.COMMANDS)


def test_help_shows_main_flags_and_help_all_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> list[str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*words])
        assert ended.value.code == 0
        return re.findall(r"^  --(\w+)", capsys.readouterr().out, re.MULTILINE)

    first, every = shown("reward", "--help"), shown("reward", "--help", "all")
    assert first[:3] == ["model_name_or_path", "dataset_name", "output_dir"] and 10 <= len(first) <= 15
    fields = {each.name for kind in (RewardConfig, ModelConfig) for each in dataclasses.fields(kind)}
    assert {*first, *fields} - {*every} == {*REMOVED} and len(every) == len({*every})
    assert "--topology" in plan.make_parser().format_help()  # the command itself changes the environment


def test_env_reports_versions_and_the_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    report = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert report["datasets"] == datasets.__version__
    assert report["runtime"].split(" ")[0] in ("xla", "native")


WRONG_WORDS = [
    ("rewrd", "rewrd"),
    ("reward --config nowhere.yaml", "nowhere.yaml"),
    ("score --text x", "--model_name_or_path"),
    ("score --model_name_or_path x", "--text"),
    ("score --model_name_or_path x --text x --dataset_name d.jsonl", "--text"),
]


@pytest.mark.parametrize(("words", "name"), WRONG_WORDS)
def test_unknown_words_exit_with_status_2_and_one_line(words: str, name: str, error_of: Callable[..., str]) -> None:
    assert name in error_of(*words.split())


STARTS = [
    (["reward"], "from trl_tpu.cli import main; main()"),
    (["score"], "from trl_tpu.cli import main; main()"),
    ([], "runpy.run_module('trl_tpu.scripts.reward', None, '__main__')"),
]


@pytest.mark.parametrize(("words", "start"), STARTS)
def test_yaml_exports_its_env_before_a_device_is_chosen(words: list[str], start: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("env: {PJRT_DEVICE: CPU}\nmax_length: 5\n")
    code = f"""
import importlib, os, runpy, sys
from trl_tpu import runtime
assert runtime.choice().name == "native"
def see(name):  # in the place of what imports the heavy part
    print(name, os.environ["PJRT_DEVICE"], runtime.choice().name, "transformers" in sys.modules)
    sys.exit()
importlib.import_module = see
sys.argv = {["x", *words, "--config", str(tmp_path / "c.yaml")]}
{start}
"""
    env = {key: value for key, value in os.environ.items() if key not in ("USE_TORCH_XLA", "PJRT_DEVICE")}
    chosen = "native" if importlib.util.find_spec("torch_xla") is None else "xla"
    assert (
        subprocesses.run_without_server("-c", code, environment=env)
        == f"trl_tpu.scripts.{(words or ['reward'])[0]} CPU {chosen} False\n"
    )


def test_scoring_rejects_a_model_without_a_trained_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"score\.weight"):
        rewards_of(synthetic.resolve_model("synthetic:tiny", str(tmp_path)), TEXTS)


def test_score_command_prints_texts_with_rewards(good_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["score", "--model_name_or_path", str(good_model), "--text", TEXTS[0], "--text", TEXTS[1]]
    assert cli.main(words) == 0
    printed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [text for _, text in printed] == TEXTS[:2]
    expected = rewards_of(good_model, TEXTS[:2])
    assert [float(number) for number, _ in printed] == pytest.approx(expected, abs=1e-4)


def test_score_command_prints_the_accuracy(good_model: Path, tmp_path: Path, capsys: Any) -> None:
    rows = [{"chosen": a, "rejected": b} for a, b in pairwise([*TEXTS, "same", "same"])]
    source, output = preference_rows.write_jsonl(tmp_path / "pairs.jsonl", rows), tmp_path / "out.jsonl"
    assert cli.main([*preference_rows.score_command(good_model, source, output), "--max_length", "12"]) == 0
    written = preference_rows.read_jsonl(output)
    unlimited = trl_tpu.score(str(good_model), [row["chosen"] for row in rows])
    expected = [None if row["tokens"] > 12 else row["reward"] for row in unlimited]
    assert [row["reward_chosen"] for row in written] == pytest.approx(expected, abs=1e-5)
    scored = [row for row in written if None not in (row["reward_chosen"], row["reward_rejected"])]
    right = sum(row["reward_chosen"] > row["reward_rejected"] for row in scored)
    assert 0 < len(scored) < len(rows)
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| accuracy") and f"{right / len(scored):.4f} (" in line for line in printed)


def test_flags_and_model_init_kwargs_are_merged() -> None:
    for flags, given, expected in [
        ({}, {"attn_implementation": "eager"}, {"dtype": "float32", "revision": "main"}),
        ({"dtype": "bfloat16"}, {"revision": "v2"}, {"dtype": "bfloat16"}),
        ({"model_revision": "a"}, {"revision": "b"}, {"dtype": "float32"}),
    ]:
        args = RewardConfig(bf16=False, report_to="none", model_init_kwargs=given)
        merged = reward.model_init_kwargs(ModelConfig(**flags), args)
        assert merged == expected | given | {"trust_remote_code": False}


def test_dry_run_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model_name_or_path", "synthetic:tiny", "--dataset_name", "synthetic:numbers", "--report_to", "none"]
    words += ["--num_train_epochs=1.5", "--per_device_train_batch_size=128", "--gradient_accumulation_steps=2"]
    reward.run([*words, "--output_dir", str(tmp_path / "run"), "--dry_run", "--push_to_hub"])
    shown = capsys.readouterr().out
    assert "Which is " in shown and "Batches of " in shown and "\n12 steps" in shown
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["synthetic-tiny"]  # only the model to train


def test_training_from_yaml_supports_adapters_and_mixtures(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    base = synthetic.resolve_model("synthetic:tiny", str(tmp_path))
    synthetic.load_dataset("synthetic:numbers")["train"].select(range(20)).to_json(tmp_path / "pairs.jsonl")
    (tmp_path / "c.yaml").write_text(
        f"model_name_or_path: {base}\noutput_dir: {tmp_path / 'out'}\n"
        "use_peft: true\nlora_target_modules: all-linear\nlora_r: 2\n"
        f"datasets:\n  - path: {tmp_path / 'pairs.jsonl'}\n    columns: [prompt, chosen, rejected]\n"
        "test_split_size: 4\ndo_eval: true\n"
        "bf16: false\nreport_to: none\nmax_steps: 5\nper_device_train_batch_size: 2\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trl", "reward", "--config", "c.yaml", "--max_steps", "1"])
    assert cli.main() == 0
    printed, out = capsys.readouterr().out.splitlines(), tmp_path / "out"
    table = printed[printed.index("Held-out data") + 1 :][:6]
    assert [row.split()[0] for row in table] == list(HELD_OUT)
    assert {f"Model saved to {out}", f"Report written to {out / 'report' / 'index.html'}"} <= set(printed)
    assert {"index.html", "margins.png", "verdict.json"} <= {path.name for path in (out / "report").iterdir()}
    assert {"README.md", "verdict.json", "verdict_margins.png"} <= {path.name for path in out.iterdir()}
    assert json.loads((out / "checkpoint-1" / "trainer_state.json").read_text())["global_step"] == 1
    chats = [synthetic.question("larger", 20, 30) + synthetic.answer(number) for number in (30, 20)]
    rewards = rewards_of(out, chats)
    assert None not in rewards and rewards[0] != rewards[1]


# ---- `trl-tpu selfcheck`


#: A child with this code in front attends wrongly in packed rows.
WRONG_KERNEL = """
import runpy
import trl_tpu.modeling.forward as forward
attend = forward.attend_packed
def wrong(*args, **kwargs):
    output, weights = attend(*args, **kwargs)
    return output * 1.1, weights
forward.attend_packed = wrong
runpy.run_module("trl_tpu.scripts.selfcheck", run_name="__main__")
"""


@pytest.mark.parametrize("is_wrong", [False, True])
def test_selfcheck_passes_and_fails_with_a_wrong_kernel(is_wrong: bool, tmp_path: Path, monkeypatch: Any) -> None:
    def forked(command: list[str], env: dict[str, str], **_: Any) -> Any:
        words = ["-c", WRONG_KERNEL, *command[3:]] if is_wrong else command[1:]
        return subprocesses.python(*words, environment=env | {"USE_TORCH_XLA": "0"})

    monkeypatch.setattr(selfcheck, "subprocess", SimpleNamespace(run=forked))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert cli.main(["selfcheck", "--output", str(tmp_path / "out.json")]) == int(is_wrong)
    report = json.loads((tmp_path / "out.json").read_text())
    passed = {line["check"]: line["passed"] for line in report["lines"]}
    assert passed["packed: losses"] is not is_wrong and passed["padded: losses"] and passed["resumed: losses"]
    assert report["versions"]["torch"] and report["runs"]["packed"]["marks"]


def test_gpu_check_runs_dry_without_a_gpu(tmp_path: Path) -> None:
    """Each part has its rows, and what is not installed has one, too."""
    parts = ("attention", "training", "speed Qwen3-0.6B")
    command = [sys.executable, "-m", "tests.gpu.check", "--output", str(tmp_path), "--parts", *parts]
    environment = {**os.environ, "USE_TORCH_XLA": "0"}
    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    table = (tmp_path / "gpu.md").read_text()
    assert process.returncode == 0 and "FAILED" not in table, table + process.stderr
    said = "flash attention | not installed; segments: error; rows: error; TRL's time; equal_the_formula[regression]"
    assert [each for each in (*parts, *said.split("; ")) if each not in table] == []


def test_failing_lines_name_headings_of_the_guide() -> None:
    page = (ROOT / "examples" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = {f"selfcheck-{words.replace(' ', '-')}" for words in re.findall(r"^### selfcheck: (.+)$", page, re.M)}
    named = {*selfcheck._TOLERANCES, "a-run-ends-early", "programs-and-reads"}
    assert {f"selfcheck-{name}" for name in named} == headings
    source = Path(selfcheck.__file__).read_text(encoding="utf-8")
    assert [name for name in named if f'"{name}"' not in source and f'{{_GUIDE}}{name}"' not in source] == []
