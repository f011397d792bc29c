"""Run the scripts of `old_scripts/`, which follow scripts of TRL and EasyDeL, and prepare their data.

They differ from the originals in the import line. TRL 1.16 cannot run them, but trains on the same tokens.
"""

import json
import os
from pathlib import Path
from typing import Any

import subprocesses
import tiny
from datasets import Dataset
from environment import ROOT, SUPPORT

CHATML = ("<|im_start|>", "<|im_end|>")
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
    "training_arguments": ([MODEL, TEXTS, "out", "8"], "texts", _OFTEN),
    "raw_rows": ([word for name, value in FLAGS.items() for word in (f"--{name}", value)], "chats", _OFTEN),
    "easydel": ([MODEL, TEXTS], "texts", _EASYDEL),
}


def prepare(folder: Path) -> None:
    """Save a model without a chat template, with ChatML's tokens in its vocabulary, and 20 pairs in every format."""
    pairs = tiny.made_up_pairs(20)
    tokenizer = tiny.tiny_tokenizer(pairs, vocab_size=400)
    tokenizer.add_special_tokens({"additional_special_tokens": list(CHATML)})
    tokenizer.chat_template = None
    tiny.tiny_model(tokenizer, vocab_size=len(tokenizer)).save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    texts = [{half: row["prompt"] + row[half] for half in ("chosen", "rejected")} for row in pairs]
    turns = [
        {half: [("user", row["prompt"]), ("assistant", row[half])] for half in ("chosen", "rejected")} for row in pairs
    ]
    chats = [{half: [{"role": role, "content": said} for role, said in row[half]] for half in row} for row in turns]
    start, end = CHATML
    rendered = [
        {half: "".join(f"{start}{role}\n{said}{end}\n" for role, said in row[half]) for half in row} for row in turns
    ]
    rows = {TEXTS: texts, CHATS: chats}
    for name, each in (("texts", texts), ("chats", rendered)):
        ids = [{f"{half}_ids": tokenizer(row[half])["input_ids"] for half in row} for row in each]
        rows[f"{TOKENS}-{name}"] = ids
    for name, each in rows.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "model").symlink_to(folder / MODEL)  # the folder that `trajectory.py` reads
        Dataset.from_list(each).to_json(folder / name / ("pairs.jsonl" if TOKENS in name else "train.jsonl"))


def losses_of_trl(folder: Path, *scripts: str) -> dict[str, list[float]]:
    """Train with TRL on the tokens of each script, and return the logged losses."""
    out = folder / "trl.json"
    runs = {name: {"max_length": None, "data": f"{TOKENS}-{SCRIPTS[name][1]}", **SCRIPTS[name][2]} for name in scripts}
    subprocesses.run("trajectory.py", "trl", str(folder), str(out), json.dumps(runs), USE_TORCH_XLA="0")
    logs = json.loads(out.read_text())
    return {name: [log["loss"] for log in logs[name] if "loss" in log] for name in scripts}


def losses(folder: Path, out: Path, script: str, words: list[str], **variables: str) -> list[float]:
    """Run a script in a folder with data and model, and return the logged losses."""
    (out / "lab").mkdir(parents=True, exist_ok=True)
    for name in (folder / "lab").iterdir():
        (out / "lab" / name.name).symlink_to(name)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"} | variables
    process = subprocesses.python(
        str(SUPPORT / "old_scripts" / f"{script}.py"), *words, environment=environment, folder=out
    )
    assert process.returncode == 0, process.stderr[-4000:]
    state = json.loads((out / "out" / "trainer_state.json").read_text())
    return [log["loss"] for log in state["log_history"] if "loss" in log]
