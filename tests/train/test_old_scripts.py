"""Scripts for TRL since 0.5 with a changed import, and a translated EasyDeL script, train with TRL 1.16's losses.

The scripts are in `support/old_scripts`. TRL 1.16 cannot run them, but trains on the same tokens. The tolerance is
1e-5: float32 sums have another order over three steps.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import tiny
from datasets import Dataset
from environment import ROOT, SUPPORT

START, END = "<|im_start|>", "<|im_end|>"  # ChatML
MODEL, TEXTS, CHATS, TOKENS = "lab/model", "lab/texts", "lab/chats", "lab/tokens"
FLAGS = {
    **{"model_name_or_path": MODEL, "dataset_name": CHATS, "output_dir": "out", "report_to": "none", "bf16": "false"},
    **{"save_strategy": "no", "optim": "adamw_torch", "logging_steps": "1", "per_device_train_batch_size": "8"},
    **{"learning_rate": "1e-3", "num_train_epochs": "1", "max_length": "512", "evaluation_strategy": "epoch"},
}
_OFTEN = {"num_train_epochs": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "warmup_steps": 0}
#: EasyDeL's defaults. A step uses all pairs, and the only log is the mean of ten steps.
_EASYDEL = {
    **{"num_train_epochs": 10, "per_device_train_batch_size": 32, "learning_rate": 5e-5, "warmup_steps": 0},
    **{"weight_decay": 0.01, "max_grad_norm": 0, "lr_scheduler_type": "constant", "logging_steps": 10},
    "center_rewards_coefficient": 0.1,
}
#: Command-line words of each script, its data, and its settings.
SCRIPTS: dict[str, tuple[list[str], str, dict[str, Any]]] = {
    "training_arguments": ([MODEL, TEXTS, "out"], "texts", _OFTEN),
    "raw_rows": ([word for name, value in FLAGS.items() for word in (f"--{name}", value)], "chats", _OFTEN),
    "easydel": ([MODEL, TEXTS], "texts", _EASYDEL),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model without a chat template, with ChatML's tokens in its vocabulary, and 20 pairs in every format."""
    folder = tmp_path_factory.mktemp("old")
    pairs = tiny.made_up_pairs(20)
    tokenizer = tiny.tiny_tokenizer(pairs, vocab_size=400)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END]})
    tokenizer.chat_template = None
    tiny.tiny_model(tokenizer, vocab_size=len(tokenizer)).save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)

    def rendered(messages: list[dict[str, str]]) -> str:
        return "".join(f"{START}{each['role']}\n{each['content']}{END}\n" for each in messages)

    texts, chats = [
        [{half: make(row["prompt"], row[half]) for half in ("chosen", "rejected")} for row in pairs]
        for make in (
            lambda prompt, answer: prompt + answer,
            lambda prompt, answer: [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}],
        )
    ]
    files = {f"{TEXTS}/train": texts, f"{CHATS}/train": chats}
    for name, rows in (("texts", texts), ("chats", [{half: rendered(row[half]) for half in row} for row in chats])):
        ids = [{f"{half}_ids": tokenizer(row[half])["input_ids"] for half in row} for row in rows]
        files[f"{TOKENS}-{name}/pairs"] = ids
    for name, rows in files.items():
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True)
        (file.parent / "model").symlink_to(folder / MODEL)  # the folder that `trajectory.py` reads
        Dataset.from_list(rows).to_json(file)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[float]]:
    """Return the losses that TRL logs on the tokens of each script."""
    out = folder / "trl.json"
    runs = {
        name: {"max_length": None, "data": f"{TOKENS}-{data}", **settings}
        for name, (_, data, settings) in SCRIPTS.items()
    }
    subprocesses.run("trajectory.py", "trl", str(folder), str(out), json.dumps(runs), USE_TORCH_XLA="0")
    return {name: losses_in(logs) for name, logs in json.loads(out.read_text()).items()}


def losses_in(logs: list[dict[str, float]]) -> list[float]:
    return [log["loss"] for log in logs if "loss" in log]


@pytest.mark.parametrize("script", SCRIPTS)
def test_old_script_has_trls_losses(script: str, folder: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "lab").symlink_to(folder / "lab")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"}
    words = (str(SUPPORT / "old_scripts" / f"{script}.py"), *SCRIPTS[script][0])
    process = subprocesses.python(*words, environment=environment, folder=tmp_path)
    assert process.returncode == 0, process.stderr[-4000:]
    losses = losses_in(json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"])
    assert len(losses) == (1 if script == "easydel" else 3)
    assert losses == pytest.approx(expected[script], abs=1e-5)
