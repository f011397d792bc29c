"""The command: quick help, a runtime report, training from flags and YAML, and scoring what training saved."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import peft
import pytest
import torch
from places import ROOT
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import trl_tpu
from trl_tpu import cli
from trl_tpu.data.tokenize import prepare_preference_dataset
from trl_tpu.modeling import adapters
from trl_tpu.scripts import reward, score, synthetic
from trl_tpu.scripts.utils import DatasetMixtureConfig, ScriptArguments
from trl_tpu.trainer.model_config import ModelConfig
from trl_tpu.trainer.reward_config import RewardConfig

TEXTS = ["one", "a much longer text than the other ones", "two words", "ends itself<|end|>", "x"]
CHATS = [synthetic.question("larger", 20, 30) + synthetic.answer(n) for n in (30, 20)]
HELD_OUT = ("accuracy", "loss", "margin", "mean_reward", "min_reward", "max_reward")
FAST = "--bf16 false --report_to none --max_steps 2 --per_device_train_batch_size 2 --gradient_checkpointing false"


def save_model(folder: Path, kind: Any = LlamaForSequenceClassification) -> Path:
    tokenizer = synthetic.tiny_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=1, initializer_range=0.3, **sizes
    )
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("saved"))


def one_by_one(folder: Path, ids: list[list[int]]) -> list[float]:
    """The reference: no padding at all, and the last token's reward by hand."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    with torch.inference_mode():
        return [model.score(model.model(torch.tensor([row])).last_hidden_state)[0, -1, 0].item() for row in ids]


def rewards_of(folder: Path, dialogues: Sequence[Any]) -> list[float | None]:
    return [row["reward"] for row in trl_tpu.score(str(folder), dialogues)]


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_help_names_the_commands_and_imports_neither_torch_nor_transformers() -> None:
    code = "import sys; from trl_tpu.cli import main; main([]); print({'torch', 'transformers'} & set(sys.modules))"
    root = str(ROOT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    assert all(f"    {name} " in done.stdout for name in cli.COMMANDS)


def test_env_reports_versions_and_the_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    report = dict(line.split(": ", 1) for line in lines(capsys))
    assert report["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert report["datasets"] == datasets.__version__
    assert report["runtime"].split(" ")[0] in ("xla", "native")


@pytest.mark.parametrize("argv", [["trl", "reward", "--help"], ["trl-tpu", "score", "--help"], ["trl-tpu", "--help"]])
def test_help_comes_from_sys_argv_as_for_trls_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_, patch("sys.argv", argv):
        cli.main()
    assert exit_.value.code == 0
    assert "usage: trl-tpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rewrd"], "invalid choice: 'rewrd'"),
        (["reward", "--config", "nowhere.yaml"], "nowhere.yaml cannot be read: No such file"),
        (["reward", "--lerning_rate", "1"], "Unknown arguments on the command line: --lerning_rate 1"),
        (["score", "--text", "x"], "the following arguments are required: --model_name_or_path"),
        (["score", "--model_name_or_path", "x"], "either `--text`"),
        (["score", "--model_name_or_path", "x", "--text", "x", "--dataset_name", "d.jsonl"], "and not both"),
    ],
)
def test_wrong_words_exit_with_status_2_and_one_clear_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(words)
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    "start", ["from trl_tpu.cli import main; main()", "runpy.run_module({module!r}, None, '__main__')"]
)
def test_yaml_exports_its_env_before_transformers_reads_it(start: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("env:\n  USE_TORCH_XLA: 0\nmax_length: 5\n")
    argv = ["x", "reward"] if "cli" in start else ["x"]
    code = (
        "import importlib, os, runpy, sys\n"
        "def see(name):\n"  # in the place of what imports the heavy part
        "    print(name, os.environ.get('USE_TORCH_XLA'), 'transformers' in sys.modules)\n"
        "    raise SystemExit(0)\n"
        "importlib.import_module = see\n"
        f"sys.argv = {[*argv, '--config', str(tmp_path / 'c.yaml')]!r}\n"
    ) + start.format(module="trl_tpu.scripts.reward")
    env = {key: value for key, value in os.environ.items() if key != "USE_TORCH_XLA"}
    root = str(ROOT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=env, check=True)
    assert done.stdout == "trl_tpu.scripts.reward 0 False\n"


@pytest.mark.parametrize("form", ["text", "prompt", "chat"])
def test_dialogues_get_the_tokens_that_training_gave_them(saved: Path, form: str) -> None:
    scorer = score.Scorer(str(saved))
    if form == "chat":
        row: dict[str, Any] = {"chosen": CHATS[0], "rejected": CHATS[1]}
        whole: list[Any] = CHATS
    else:
        row = {"chosen": TEXTS[0], "rejected": TEXTS[3]} | ({"prompt": "Say: "} if form == "prompt" else {})
        whole = [row.get("prompt", "") + row[key] for key in ("chosen", "rejected")]
    rows = datasets.Dataset.from_list([row])
    settings: dict[str, Any] = {"num_embeddings": 1000, "max_length": None, "num_proc": None, "name": "x"}
    trained: Any = prepare_preference_dataset(rows, scorer.tokenizer, **settings)
    ids = [*trained["chosen_ids"], *trained["rejected_ids"]]
    (pair,) = trl_tpu.score(scorer, rows)
    assert [pair["tokens_chosen"], pair["tokens_rejected"]] == [*map(len, ids)]
    assert [pair["reward_chosen"], pair["reward_rejected"]] == pytest.approx(one_by_one(saved, ids), abs=1e-5)
    alone = rewards_of(saved, whole)
    assert [pair["reward_chosen"], pair["reward_rejected"]] == pytest.approx(alone, abs=1e-5)


def test_a_folder_of_adapters_is_scored_on_its_base(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", LlamaForCausalLM)
    model: Any = LlamaForSequenceClassification.from_pretrained(base, num_labels=1)
    adapted: Any = adapters.add_adapters(model, peft.LoraConfig(task_type="SEQ_CLS"))
    with torch.no_grad():
        for _, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(tmp_path / "adapters")
    synthetic.tiny_tokenizer().save_pretrained(tmp_path / "adapters")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    synthetic.tiny_tokenizer().save_pretrained(tmp_path / "merged")
    expected = rewards_of(tmp_path / "merged", CHATS)
    assert rewards_of(tmp_path / "adapters", CHATS) == pytest.approx(expected, abs=1e-4)


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a saved reward model: it lacks .*score.weight.*random"):
        rewards_of(save_model(tmp_path, LlamaForCausalLM), TEXTS)


def test_the_score_command_prints_texts(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["score", "--model_name_or_path", str(saved), "--text", TEXTS[0], "--text", TEXTS[1]]
    assert cli.main(words) == 0
    printed = [line.split(maxsplit=1) for line in lines(capsys)]
    assert [text for _, text in printed] == TEXTS[:2]
    expected = rewards_of(saved, TEXTS[:2])
    assert [float(number) for number, _ in printed] == pytest.approx(expected, abs=1e-4)


def test_the_score_command_writes_rows_and_prints_the_accuracy_of_pairs(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"chosen": a, "rejected": b, "id": i} for i, (a, b) in enumerate(zip(TEXTS, TEXTS[1:], strict=False))]
    rows.append({"chosen": "same", "rejected": "same", "id": 9})
    source, output = tmp_path / "pairs.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["score", "--model_name_or_path", str(saved), "--dataset_name", str(source), "--max_length", "12"]
    assert cli.main([*words, "--output", str(output)]) == 0
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [{key: row[key] for key in rows[0]} for row in written] == rows
    unlimited = trl_tpu.score(str(saved), [row["chosen"] for row in rows])
    expected = [None if row["tokens"] > 12 else row["reward"] for row in unlimited]
    assert [row["reward_chosen"] for row in written] == pytest.approx(expected, abs=1e-5)
    scored = [row for row in written if None not in (row["reward_chosen"], row["reward_rejected"])]
    right = sum(row["reward_chosen"] > row["reward_rejected"] for row in scored)
    assert 0 < len(scored) < len(rows)
    printed = lines(capsys)
    assert any(line.startswith("| accuracy") and f"{right / len(scored):.4f} (" in line for line in printed)


def config(**kwargs: Any) -> Any:
    return RewardConfig(bf16=False, report_to="none", **kwargs)


@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [
        ({}, None, {"revision": "main", "dtype": "float32", "trust_remote_code": False}),
        ({"dtype": "bfloat16"}, {"revision": "v2"}, {"dtype": "bfloat16", "revision": "v2"}),
        ({"model_revision": "a"}, {"revision": "b"}, {"revision": "b"}),
        ({}, {"attn_implementation": "eager"}, {"attn_implementation": "eager"}),
    ],
)
def test_flags_and_model_init_kwargs_are_merged(flags: Any, given: Any, expected: Any) -> None:
    merged = reward.model_init_kwargs(ModelConfig(**flags), config(model_init_kwargs=given))
    assert merged == {"revision": "main", "dtype": "float32", "trust_remote_code": False} | expected


def test_a_missing_split_model_or_dataset_is_named_before_any_training(tmp_path: Path) -> None:
    source = tmp_path / "d.jsonl"
    source.write_text('{"chosen": "a", "rejected": "b"}\n')
    arguments = config(output_dir=str(tmp_path / "out"), eval_strategy="steps")
    model = ModelConfig(model_name_or_path="synthetic:tiny")
    with pytest.raises(ValueError, match="d.jsonl has no split 'test'; its splits are: 'train'"):
        reward.main(ScriptArguments(dataset_name=str(source)), arguments, model, DatasetMixtureConfig())
    with pytest.raises(ValueError, match="must be provided"):
        reward.main(ScriptArguments(), arguments, model, DatasetMixtureConfig())
    with pytest.raises(ValueError, match="Name a model"):
        reward.main(ScriptArguments(dataset_name=str(source)), arguments, ModelConfig(), DatasetMixtureConfig())
    assert not (tmp_path / "out").exists()


def test_training_from_flags_evaluates_saves_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = f"reward --model_name_or_path synthetic:tiny --dataset_name synthetic:numbers --output_dir {out} {FAST}"
    with patch("sys.argv", ["trl", *words.split(), "--do_eval"]):
        assert cli.main() == 0
    printed = lines(capsys)
    table = printed[printed.index("Held-out data") + 1 :][:6]
    assert [row.split()[0] for row in table] == list(HELD_OUT)
    assert f"Model saved to {out}" in printed
    assert f"Report written to {out / 'report' / 'index.html'}" in printed
    assert {"index.html", "margins.png", "verdict.json"} <= {path.name for path in (out / "report").iterdir()}
    assert {"config.json", "README.md", "verdict.json", "verdict_margins.png"} <= {path.name for path in out.iterdir()}


@pytest.mark.parametrize("device", ["this process's", pytest.param("XLA's", marks=pytest.mark.long)])
def test_training_from_yaml_with_adapters_on_a_mixture_of_files(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On XLA in a process of its own, which the file alone tells of the device."""
    if device == "XLA's" and importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    base = save_model(tmp_path / "base", LlamaForCausalLM)
    synthetic.load_dataset("synthetic:numbers")["train"].select(range(20)).to_json(tmp_path / "pairs.jsonl")
    chosen = "env: {USE_TORCH_XLA: 1, PJRT_DEVICE: CPU, CPU_NUM_DEVICES: 1}\n" if device == "XLA's" else ""
    (tmp_path / "c.yaml").write_text(
        f"{chosen}model_name_or_path: {base}\noutput_dir: {tmp_path / 'out'}\n"
        "use_peft: true\nlora_target_modules: all-linear\nlora_r: 2\n"
        f"datasets:\n  - path: {tmp_path / 'pairs.jsonl'}\n    columns: [prompt, chosen, rejected]\n"
        "test_split_size: 4\ndo_eval: true\n"
        "bf16: false\nreport_to: none\nmax_steps: 5\nper_device_train_batch_size: 2\n"
    )
    words = ["--config", str(tmp_path / "c.yaml"), "--max_steps", "1"]
    if device == "XLA's":
        env = {key: value for key, value in os.environ.items() if key != "USE_TORCH_XLA"}
        command = [sys.executable, "-m", "trl_tpu.scripts.reward", *words]
        assert subprocess.run(command, cwd=tmp_path, env=env | {"PYTHONPATH": str(ROOT)}).returncode == 0
    else:
        monkeypatch.chdir(tmp_path)
        assert cli.main(["reward", *words]) == 0
    printed = capfd.readouterr().out
    assert f"Model saved to {tmp_path / 'out'}" in printed
    assert re.search(r"Held-out data\n  accuracy +[01]\.\d+\n  loss +\d\.\d+", printed)
    assert json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())["global_step"] == 1
    rewards = rewards_of(tmp_path / "out", CHATS)
    assert None not in rewards and rewards[0] != rewards[1]
