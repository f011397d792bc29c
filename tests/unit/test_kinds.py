"""A new kind of row is a new file: the toy kind of the guide is trained, evaluated, scored and reported."""

import os
import re
import shutil
from pathlib import Path

import subprocesses
from environment import ROOT, SUPPORT

GUIDE = ROOT / "examples" / "guides" / "how_this_package_is_built.md"
RUN = """
import json, sys
import tiny
from datasets import Dataset
from preference_rows import write_jsonl
from training import QUIET
from trl_tpu import RewardConfig, RewardTrainer, cli
from pathlib import Path
folder = Path(sys.argv[1])
rows = [{"prompt": f"Is {n} odd?", "completions": [" yes", " no"], "thumbs": ["up", "down"]} for n in range(1, 81, 2)]
model = tiny.save_tiny(folder / "model", [row["prompt"] + text for row in rows for text in row["completions"]])
data = Dataset.from_list(rows)
args = RewardConfig(str(folder / "run"), **QUIET | {"max_steps": 4})
trainer = RewardTrainer(model, args, train_dataset=data, eval_dataset=data)
trainer.train()
metrics = trainer.evaluate()
assert trainer.predict(data).label_ids[0].tolist() == [1.0, 0.0]
trainer.save_model()
scored = folder / "scored.jsonl"
flags = ["--dataset_name", str(write_jsonl(folder / "rows.jsonl", rows)), "--output", str(scored)]
assert cli.main(["score", "--model_name_or_path", str(folder / "run"), *flags]) == 0
assert cli.main(["report", str(scored), "--output", str(folder / "report")]) == 0
said = json.loads((folder / "report" / "verdict.json").read_text())
assert said["pairs"] == 40 and said["accuracy"]["value"] == metrics["eval_accuracy"]
"""


def test_toy_kind_of_the_guide_is_trained_scored_and_reported(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(ROOT / "trl_tpu", root / "trl_tpu", ignore=shutil.ignore_patterns("__pycache__"))
    (diff,) = re.findall(r"```diff\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for name, change in re.findall(r"\+\+\+ b/(\S+)\n(.*?)(?=^--- |\Z)", diff, re.DOTALL | re.MULTILINE):
        path = root / name
        for hunk in re.split(r"^@@.*\n", change, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in signs) for signs in ("- ", "+ "))
            text = path.read_text() if path.exists() else ""
            assert old in text
            path.write_text(text.replace(old, new, 1) if old else new)
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (root, ROOT, SUPPORT)))}
    subprocesses.run("-c", RUN, str(tmp_path), **environment, **{subprocesses.ONLY: "transformers.trainer"})
