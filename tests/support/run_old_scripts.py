"""What runs the scripts of `old_scripts/`, written after those that TRL shipped, and what their data is."""

import json
import os
import re
import subprocess
from pathlib import Path

import apart
import tiny
from datasets import Dataset
from places import ROOT, SUPPORT

FOLDER = SUPPORT / "old_scripts"
CHATML = ("<|im_start|>", "<|im_end|>")
MODEL, TEXTS, CHATS, TOKENS = "lab/model", "lab/texts", "lab/chats", "lab/tokens"
_QUIET = {"report_to": "none", "save_strategy": "no", "bf16": "false", "optim": "adamw_torch", "logging_steps": "1"}
_TRAINING = {"per_device_train_batch_size": "8", "learning_rate": "1e-3", "num_train_epochs": "1", "max_length": "512"}
COMMON = [word for name, value in (_QUIET | _TRAINING).items() for word in (f"--{name}", value)]
#: The words of each script, and the data that it trains on.
SCRIPTS: dict[str, tuple[list[str], str]] = {
    "model_config": (
        ["--model_name_or_path", MODEL, "--output_dir", "out", "--torch_dtype", "float32", "--overwrite_output_dir"]
        + ["--evaluation_strategy", "steps", "--eval_steps", "2", "--remove_unused_columns", "False"]
        + ["--gradient_checkpointing", "True", *COMMON],
        "texts",
    ),
    "chat_format": (
        ["--model_name_or_path", MODEL, "--dataset_name", CHATS, "--output_dir", "out", *COMMON],
        "chats",
    ),
    "raw_rows": (
        ["--model_name_or_path", MODEL, "--dataset_name", CHATS, "--output_dir", "out", "--eval_strategy", "epoch"]
        + [*COMMON],
        "chats",
    ),
}


def prepare(folder: Path) -> None:
    """Save the model without a chat template, whose vocabulary has ChatML's tokens, and 20 pairs in every form."""
    pairs = tiny.made_up_pairs(20)
    tokenizer = tiny.tiny_tokenizer([*pairs["prompt"], *pairs["chosen"], *pairs["rejected"]], vocab_size=400)
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
        Dataset.from_list(each).to_json(folder / name / "train.jsonl")


def run(folder: Path, out: Path, *words: str, **variables: str) -> list[float]:
    """Run `python words...` in a folder where data and model are, and return the losses that the script logged."""
    for name in (folder / "lab").iterdir():
        (out / "lab").mkdir(parents=True, exist_ok=True)
        (out / "lab" / name.name).symlink_to(name)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | variables
    process: subprocess.CompletedProcess[str] = apart.python(*words, environment=environment, folder=out)
    assert process.returncode == 0, process.stderr[-4000:]
    state = json.loads((out / "out" / "trainer_state.json").read_text())
    return [log["loss"] for log in state["log_history"] if "loss" in log]


def with_our_import(script: str, out: Path) -> Path:
    """Write a script with its import changed, and nothing else."""
    path = out / f"{script}.py"
    text = (FOLDER / f"{script}.py").read_text()
    path.write_text(re.sub(r"^(from|import) trl\b", r"\1 trl_tpu", text, flags=re.MULTILINE))
    return path
