"""The recipes, the notebook and the toy kind of row in `examples` run, and their texts state the truth."""

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import guide_notebook
import pytest
import subprocesses
import yaml
from environment import EXAMPLES, ROOT, SUPPORT
from fake_compiler import layouts_of, save_config
from nbformat import NotebookNode
from preference_rows import assistant, tiny_tokenizer, user

from trl_tpu.data.formats import apply_template, date_written
from trl_tpu.scripts import reward

FOLDER = EXAMPLES / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
OF_THE_TRAINING = ("max_length", "total_batch_size", "per_device_train_batch_size", "num_train_epochs")


def head(recipe: Path) -> str:
    """Return the comment at the beginning of a recipe as one line."""
    lines = recipe.read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in lines)
    return " ".join(" ".join(line.lstrip("# ") for line in lines).split())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_is_parsed_planned_and_listed_as_its_header_states(recipe: Path, tmp_path: Path) -> None:
    """A small model replaces the recipe's, and the compiler is fake."""
    arguments = ["--config", str(recipe), "--report_to", "none", "--use_cpu", "true"]
    script, args, model, data = reward.make_parser().parse_args_and_config(arguments)
    settings = yaml.safe_load(recipe.read_text())
    assert (args.learning_rate, args.total_batch_size) == (settings["learning_rate"], settings["total_batch_size"])
    assert model.model_name_or_path and args.eval_strategy == "steps"
    assert script.dataset_name or (data.datasets and data.test_split_size)
    told = head(recipe)
    assert "IT FITS" in told and (FOLDER / "README.md").read_text().count(f"({recipe.name})") == 1

    (command,) = re.findall(r"`trl-tpu plan (.*?)`", told)
    words = shlex.split(command)
    assert words[words.index("--model_name_or_path") + 1] == settings["model_name_or_path"]
    save_config(tmp_path)
    (layout,) = layouts_of(*words, "--model_name_or_path", str(tmp_path))
    planned = {name: getattr(layout.args, name) for name in OF_THE_TRAINING}
    assert planned == {name: settings[name] for name in OF_THE_TRAINING}
    assert layout.args.gradient_accumulation_steps * layout.batch_size == settings["total_batch_size"]


def test_llama3_template_has_no_date() -> None:
    tokenizer: Any = tiny_tokenizer(bos_token="<|begin|>")
    tokenizer.chat_template = (FOLDER / "llama3_without_date.jinja").read_text()
    chat = [user(" Sky? "), assistant("Blue.")]
    turns = "".join(
        f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"
        for role, text in [("system", ""), ("user", "Sky?"), ("assistant", "Blue.")]
    )
    assert apply_template(tokenizer, chat) == f"<|begin|>{turns}"
    told = [{"role": "system", "content": "Be kind."}, *chat]
    assert apply_template(tokenizer, told) == "<|begin|>" + turns.replace("<|eot_id|>", "Be kind.<|eot_id|>", 1)
    assert date_written(tokenizer, [(chat, {})]) is None


# ---- the notebook


ABSOLUTE_PATH = re.compile(r"(?<![\w.<:/])/[\w.-]+/|\b[A-Z]:\\")


@pytest.fixture(scope="module")
def stored() -> NotebookNode:
    return guide_notebook.read()


def texts(cell: NotebookNode) -> list[str]:
    """Return the text outputs of a code cell, without pictures."""
    return [
        text
        for output in cell.outputs
        for kind, text in (output.get("data") or {"text/plain": output.get("text", "")}).items()
        if not kind.startswith("image/")
    ]


def kinds(cell: NotebookNode) -> list[str]:
    """Return "image" or "text" for each output of a code cell."""
    is_image = [any(kind.startswith("image/") for kind in output.get("data", {})) for output in cell.outputs]
    return ["image" if image else "text" for image in is_image]


def test_notebook_trains_an_accurate_model_with_the_stored_outputs(stored: NotebookNode, tmp_path: Path) -> None:
    executed = guide_notebook.execute(tmp_path, timeout=80)  # raises the error of a cell
    guide_notebook.clean(executed)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["runs"]
    cells = {cell.id: cell for cell in guide_notebook.code_cells(executed)}
    (accuracy,) = re.findall(r"Accuracy on held-out pairs: ([\d.]+)", "\n".join(texts(cells["evaluate"])))
    assert float(accuracy) > 0.9
    pairs = re.findall(r"([-\d.]+) with trl_tpu, ([-\d.]+) with transformers", texts(cells["transformers"])[0])
    assert len(pairs) == 2
    assert all(float(ours) == pytest.approx(float(theirs), abs=2e-4) for ours, theirs in pairs)
    new = {name: kinds(cell) for name, cell in cells.items()}
    assert {cell.id: kinds(cell) for cell in guide_notebook.code_cells(stored)} == new


def test_stored_outputs_are_clean(stored: NotebookNode) -> None:
    cleaned = guide_notebook.read()
    guide_notebook.clean(cleaned)
    assert cleaned == stored
    for cell in guide_notebook.code_cells(stored):
        found = [match for text in (cell.source, *texts(cell)) for match in ABSOLUTE_PATH.findall(text)]
        assert found == [], cell.id


def test_notebook_is_small_and_its_links_exist(stored: NotebookNode) -> None:
    assert guide_notebook.NOTEBOOK.stat().st_size < 400_000
    assert len(guide_notebook.code_cells(stored)) <= 14
    text = "\n".join(cell.source for cell in stored.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#:]+)", text)
    assert len(links) > 5
    assert [link for link in links if not (guide_notebook.NOTEBOOK.parent / link).exists()] == []
    for page in (ROOT / "README.md", guide_notebook.NOTEBOOK.parent / "guides" / "first_reward_model.md"):
        assert f"{guide_notebook.NOTEBOOK.name})" in page.read_text(encoding="utf-8"), page


# ---- a new kind of row is a new file: the toy kind of a guide


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
