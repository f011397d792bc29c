"""The help of ``trl-tpu reward``: what most runs set, in groups. ``--help_all`` shows every flag there is."""

import argparse
import re
import shutil
import textwrap
from typing import Any

EXAMPLES = """\
  trl-tpu reward --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
      --dataset_name trl-lib/ultrafeedback_binarized --output_dir runs/rm
  trl-tpu reward --config examples/quickstart.yaml --resume_from_checkpoint true"""
#: In each group the flags that TRL has not come first.
GROUPS = {
    "What to train": ["model_name_or_path", "use_peft", "lora_r", "lora_target_modules", "dtype"],
    "Data": ["dataset_name", "dataset_train_split", "dataset_test_split", "max_length", "chat_template_path"],
    "Batches and steps": ["packing", "max_shapes", "per_device_train_batch_size", "gradient_accumulation_steps"]
    + ["num_train_epochs", "max_steps", "learning_rate", "center_rewards_coefficient"],
    "Devices and memory": ["mesh", "sharding_plan", "remat", "scan_layers", "bf16"],
    "Saving": ["output_url", "training_time_limit", "save_interval_minutes", "output_dir", "save_steps"]
    + ["resume_from_checkpoint", "push_to_hub", "hub_model_id"],
    "Evaluation and logs": ["dry_run", "nonfinite_limit", "eval_strategy", "eval_steps", "load_best_model_at_end"]
    + ["logging_steps", "report_to"],
}


class ShortHelp(argparse.Action):
    """Prints `short_help`, and ends."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(short_help(parser))
        parser.exit()


def add_help(parser: argparse.ArgumentParser) -> None:
    """Give a parser that was made without help both kinds of it."""
    parser.add_argument("-h", "--help", action=ShortHelp, help="Show what most runs set.")
    parser.add_argument("--help_all", action="help", help="Show every flag, transformers' among them.")


def short_help(parser: argparse.ArgumentParser) -> str:
    """Return the flags of `GROUPS`, a line each: name, what its help says first, and the default."""
    width = shutil.get_terminal_size((110, 0)).columns
    lines = [f"usage: {parser.prog} [--FLAG VALUE ...], to train a reward model on preference pairs", "", EXAMPLES]
    for group, names in GROUPS.items():
        lines += ["", f"{group}:", *(_line(parser._option_string_actions[f"--{name}"], width) for name in names)]
    lines += ["", "--config FILE takes any flag from a YAML file; --help_all shows all of them, transformers' too."]
    return "\n".join(lines)


def _line(action: argparse.Action, width: int) -> str:
    first = re.split(r"\. (?=[A-Z`])|[;:] ", (action.help or "").replace("%%", "%"))[0].rstrip(".")
    default = getattr(action.default, "value", action.default)
    shown = "" if default in (None, argparse.SUPPRESS, "", False) else f" [{default}]"
    room = max(width - 33 - len(shown), 20)
    return f"  --{action.dest:<28} {textwrap.shorten(first, room, placeholder=' ...')}{shown}"
