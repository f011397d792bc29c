"""Train a reward model: ``trl-tpu reward``, or ``python -m trl_tpu.scripts.reward``."""

import copy
import dataclasses
import logging
import sys
from typing import TYPE_CHECKING, Any

from trl_tpu.errors import UserError
from trl_tpu.scripts import SYNTHETIC

# nothing heavy at the top: the command exports the `env` of its YAML file before transformers is imported
if TYPE_CHECKING:
    from trl_tpu.scripts.parser import TrlParser
    from trl_tpu.scripts.utils import DatasetMixtureConfig, ScriptArguments
    from trl_tpu.trainer.model_config import ModelConfig
    from trl_tpu.trainer.reward_config import RewardConfig

logger = logging.getLogger(__name__)

LAUNCHER_FLAGS = ("accelerate_config", "config_file", "num_machines", "num_processes")


def main(
    script_args: "ScriptArguments",
    training_args: "RewardConfig",
    model_args: "ModelConfig",
    dataset_args: "DatasetMixtureConfig",
) -> None:
    """Train and save; evaluate on the held-out split and push to the Hub where that is asked for.

    Args:
        script_args: The dataset, by name.
        training_args: How to train; stays as it is.
        model_args: The model, its adapters and its quantization.
        dataset_args: The dataset as a mixture, which wins over the name.

    Raises:
        UserError: No model, no dataset, no such split, or contradicting arguments for the model.
        Unfinished: Training was told to stop, or ran out of time, and has saved a checkpoint to resume from.
        SavesFailed: The model was trained and saved, but not every checkpoint on the way.
    """
    from trl_tpu.checkpoint.background import SavesFailed
    from trl_tpu.modeling.adapters import get_peft_config, get_quantization_config
    from trl_tpu.scripts.datafiles import pick_split
    from trl_tpu.trainer.reward_trainer import RewardTrainer

    if not model_args.model_name_or_path:
        raise UserError("Name a model with `--model_name_or_path`: a Hub id, a local folder, or synthetic:tiny.")
    training_args = copy.copy(training_args)
    training_args.model_init_kwargs = model_init_kwargs(model_args, training_args)
    output_dir = str(training_args.output_dir)
    dataset = load_data(script_args, dataset_args)
    what = "the mixture" if dataset_args.datasets else str(script_args.dataset_name)
    train_dataset = pick_split(dataset, script_args.dataset_train_split, what)
    eval_dataset = None
    if training_args.eval_strategy != "no" or training_args.do_eval:
        eval_dataset = pick_split(dataset, script_args.dataset_test_split, what)

    trainer = RewardTrainer(
        model=local_model(model_args.model_name_or_path, output_dir),
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    # not `accelerator.print`, which prints nothing on XLA: there accelerate numbers the only local process -1
    main_process = trainer.is_world_process_zero()
    if main_process:
        print(trainer.describe())
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(training_args.resume_from_checkpoint))
    if trainer.stopped_by is not None:
        trainer.end()  # closes the trackers
        raise trainer.unfinished(trainer.stopped_by)
    trainer.save_model(output_dir)
    if main_process:
        print(f"Model saved to {training_args.output_url or output_dir}")
    if eval_dataset is not None:
        metrics = trainer.evaluate()  # by all processes
        if main_process:
            print(held_out_table(metrics))
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
        if main_process:
            print(f"Model pushed to https://huggingface.co/{trainer.hub_model_id}")
    if not dataset_args.datasets and what.startswith(SYNTHETIC) and main_process:
        print_examples(output_dir)
    trainer.end()  # closes the trackers
    if trainer.checkpointer.failed:
        raise SavesFailed(trainer.checkpointer.failed)


def model_init_kwargs(model_args: "ModelConfig", training_args: "RewardConfig") -> dict[str, Any]:
    """Merge what loads the model: the flags, and over their defaults what ``model_init_kwargs`` says.

    Raises:
        UserError: A flag that was given and ``model_init_kwargs`` say two different things.
    """
    flags = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        "trust_remote_code": training_args.trust_remote_code,
    }
    defaults = {
        field.name: field.default for config in (model_args, training_args) for field in dataclasses.fields(config)
    }
    given: Any = training_args.model_init_kwargs or {}
    for name in flags.keys() & given.keys():
        flag = "model_revision" if name == "revision" else name
        if flags[name] not in (defaults[flag], given[name]):
            raise UserError(
                f"`--{flag} {flags[name]}` and `--model_init_kwargs` with {name}={given[name]!r} contradict each "
                "other: say it in one place."
            )
    return {name: value for name, value in flags.items() if name != "attn_implementation" or value is not None} | given


def load_data(script_args: "ScriptArguments", dataset_args: "DatasetMixtureConfig") -> Any:
    """Load the splits of the mixture, or else of the named dataset.

    Raises:
        UserError: Neither is given.
    """
    from trl_tpu.scripts.utils import get_dataset, load_named_dataset

    if not dataset_args.datasets:
        return load_named_dataset(script_args)
    if script_args.dataset_name:
        logger.warning(
            f"Both `datasets` and `dataset_name` are given: the mixture `datasets` is used, and "
            f"`dataset_name={script_args.dataset_name}` is not."
        )
    return get_dataset(dataset_args)


def local_model(name: str, output_dir: str) -> str:
    """Return the name, or for ``synthetic:NAME`` the folder below `output_dir` where that model is made."""
    if not name.startswith(SYNTHETIC):
        return name
    from trl_tpu.scripts import synthetic

    return synthetic.resolve_model(name, output_dir)


def checkpoint_to_resume(value: str | bool | None) -> str | bool | None:
    """Return what `Trainer.train` expects: a path, True for the last checkpoint of the output folder, or None.

    A command line can only say ``--resume_from_checkpoint true``, which the trainer would take for a path.
    """
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return True if value.lower() == "true" else None
    return value


def held_out_table(metrics: dict[str, float]) -> str:
    """List accuracy, loss, margin and reward statistics on the held-out split, a line each.

    Args:
        metrics: What `RewardTrainer.evaluate` returns; keys begin with ``eval_``.
    """
    rows = ("accuracy", "loss", "margin", "mean_reward", "min_reward", "max_reward")
    lines = [f"  {name:<12} {metrics[f'eval_{name}']:>9.4f}" for name in rows if f"eval_{name}" in metrics]
    return "\n".join(["Held-out pairs", *lines])


def print_examples(model_folder: str) -> None:
    """Score the synthetic task's examples with the saved model, as anyone who loads it would."""
    from trl_tpu.scripts import score, synthetic

    print("Scored by the saved model:")
    for messages, reward in zip(synthetic.EXAMPLES, score.score_texts(model_folder, synthetic.EXAMPLES), strict=True):
        print(f"  {reward:9.4f}  " + " ".join(f"{message['role']}: {message['content']}" for message in messages))


def make_parser(subparsers: Any = None, prog: str | None = None) -> "TrlParser":
    """Make the parser of the command's flags, alone or below the `subparsers` of another."""
    from trl_tpu.scripts.parser import TrlParser
    from trl_tpu.scripts.utils import DatasetMixtureConfig, ScriptArguments
    from trl_tpu.trainer.model_config import ModelConfig
    from trl_tpu.trainer.reward_config import RewardConfig

    types = (ScriptArguments, RewardConfig, ModelConfig, DatasetMixtureConfig)
    if subparsers is None:
        return TrlParser(types, prog=prog)
    return subparsers.add_parser("reward", help="Train a reward model", dataclass_types=types)


def parse(parser: "TrlParser", argv: list[str]) -> tuple[Any, ...]:
    """Parse the command line into the four argument objects.

    Raises:
        UserError: Unknown arguments, and those of accelerate's launcher in particular.
    """
    *parsed, unknown_keys, unknown_words = parser.parse_args_and_config(
        argv, return_remaining_strings=True, separate_remaining_strings=True
    )
    unknown = [word.partition("=")[0].removeprefix("--").replace("-", "_") for word in unknown_keys + unknown_words]
    if launcher := [name for name in LAUNCHER_FLAGS if name in unknown]:
        raise UserError(
            f"`--{launcher[0]}` belongs to accelerate's launcher, which is not used here: one process drives every "
            "device of the host by itself (SPMD). Remove it; `--mesh` says how the devices are used."
        )
    if unknown_keys:
        raise parser.unknown_arguments(unknown_keys, "in the config file")
    if unknown_words:
        raise parser.unknown_arguments(unknown_words, "on the command line")
    return tuple(parsed)


def run(argv: list[str]) -> int:
    """Run the command ``trl-tpu reward``; returns the exit status."""
    parser = make_parser(prog="trl-tpu reward")
    try:
        parsed = parse(parser, argv)
    except ValueError as error:  # transformers refuses settings by plain ones
        parser.error(str(error))
    from trl_tpu.scripts.datafiles import naming_bad_lines

    with naming_bad_lines(parsed[0].dataset_name, *(part.path for part in parsed[3].datasets)):
        main(*parsed)
    return 0


if __name__ == "__main__":
    from trl_tpu.cli import main as command

    raise SystemExit(command(["reward", *sys.argv[1:]]))
