"""Recipes of examples/recipes: parsed, planned as stated in their headers, and listed in the folder's table."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from environment import EXAMPLES
from fake_compiler import layouts_of, save_config
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
