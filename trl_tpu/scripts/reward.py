"""Train a reward model: ``trl-tpu reward`` or ``python -m trl_tpu.scripts.reward``, and ``trl-tpu prm`` for steps."""

import sys

if __name__ == "__main__":  # the command exports the `env` of its YAML file before the imports below read it
    from trl_tpu.cli import main as command

    raise SystemExit(command(["reward", *sys.argv[1:]]))

import copy
import logging
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError

from trl_tpu.checkpoint.folders import RemoteRun, RunFolder
from trl_tpu.config.reward_config import RewardConfig, dataclass_with_help
from trl_tpu.data.checks import RAW_COLUMNS
from trl_tpu.data.kinds import answers_of, labels_of
from trl_tpu.errors import BEST_LOST, NOT_SAVED, UNFINISHED
from trl_tpu.experimental.prm import PRMConfig, PRMTrainer
from trl_tpu.modeling.adapters import get_peft_config, get_quantization_config
from trl_tpu.runtime import flush_denormals
from trl_tpu.scripts.parser import CommandParser, TrlParser
from trl_tpu.scripts.synthetic import resolve_model
from trl_tpu.scripts.utils import DatasetMixtureConfig, ScriptArguments, load_splits, pick_split
from trl_tpu.trainer.model_config import ModelConfig
from trl_tpu.trainer.reward_trainer import RewardTrainer
from trl_tpu.training.stopping import end_forks_by_sigterm

logger = logging.getLogger(__name__)

#: The flags that `--help` shows.
_MAIN_FLAGS = (
    *("model_name_or_path", "dataset_name", "output_dir", "learning_rate", "num_train_epochs", "total_batch_size"),
    *("per_device_train_batch_size", "max_length", "eval_strategy", "use_peft", "mesh", "resume_from_checkpoint"),
)


@dataclass_with_help
class RewardScriptArguments(ScriptArguments):
    """The dataset of a training, and whether to train.

    Args:
        dry_run: Show a row as the model will see it, the devices, the layout of a batch and the number of steps. Then
            exit before the first step. Nothing is saved or pushed.
    """

    dry_run: bool = False


def main(
    script_args: ScriptArguments,
    training_args: RewardConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
    dry_run: bool = False,
) -> None:
    """Train and save a model; evaluate on the held-out split and push to the Hub if the settings ask for it.

    Args:
        script_args: The dataset, by name.
        training_args: Settings of the training; the object is not changed.
        model_args: The model, its adapters and its quantization.
        dataset_args: The dataset as a mixture; takes precedence over the name.
        dry_run: Whether to only show the training: see `RewardScriptArguments`.

    Raises:
        UserError: No model, no dataset, or no such split.
        Unfinished: Training was preempted or reached its time limit, and has saved a checkpoint to resume from.
        SystemExit: With status 73, the last model was saved, because the best model could not be loaded. With status
            74, the model or a checkpoint could not be saved. The log names the fault.
    """
    training_args = copy.copy(training_args)
    training_args.model_init_kwargs = model_init_kwargs(model_args, training_args)
    checkpoint: Any = training_args.resume_from_checkpoint
    checkpoint = {"true": True, "false": None}.get(str(checkpoint).lower(), checkpoint)  # flags are text
    if dry_run:
        training_args.push_to_hub = False  # otherwise the trainer creates the repository
    else:
        end_by_sigterm(training_args, checkpoint)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    trainer = make_trainer(script_args, training_args, model_args, dataset_args)
    show = partial(print, flush=True) if trainer.is_world_process_zero() else lambda _: None
    if dry_run:
        *_, steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
        show(f"{first_row(trainer)}\n{trainer.describe()}")
        show(f"{steps:,} steps; nothing was trained, since --dry_run ends before the first.")
        return
    show(trainer.describe())
    trainer.trl_tpu.is_described = True
    trainer.trl_tpu.at_late_sigterm = lambda: None  # the work after training is short
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # training installs its own handler; a second SIGTERM kills
    trainer.train(resume_from_checkpoint=checkpoint)
    # ignore the first SIGTERM from now on, so that the command's result is complete; a second SIGTERM kills
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    if trainer.stopped_by is not None:
        trainer.end()  # closes the trackers
        raise trainer.trl_tpu.unfinished(trainer.stopped_by)
    try:
        trainer.save_model(_internal_call=True)  # pushed below
    except (OSError, SafetensorError) as error:
        logger.error("The model was NOT saved (%s). Checkpoints are unchanged; free space, then resume.", error)
        raise SystemExit(NOT_SAVED) from error
    show(f"Model saved to {training_args.output_url or training_args.output_dir}")
    if trainer.eval_dataset is not None:
        show(held_out_table(trainer.evaluate()))
    trainer.save_description(dataset_name=script_args.dataset_name)
    if trainer.is_world_process_zero():
        write_run_report(trainer)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
        show(f"Model pushed to https://huggingface.co/{trainer.hub_model_id}")
    trainer.end()  # closes the trackers
    if trainer.trl_tpu.best_model_lost is not None:
        raise SystemExit(BEST_LOST)
    if trainer.trl_tpu.checkpointer.failed:
        raise SystemExit(NOT_SAVED)


def make_trainer(
    script_args: ScriptArguments, args: RewardConfig, model_args: ModelConfig, dataset_args: DatasetMixtureConfig
) -> RewardTrainer:
    """Load the data and make the trainer. Raises UserError as described in `main`."""
    model = resolve_model(model_args.model_name_or_path, str(args.output_dir))
    dataset, what = load_splits(script_args, dataset_args)
    fix = " Set test_split_size, such as 0.1, to hold out rows."
    args.do_eval |= args.eval_on_start  # `eval_strategy` has also set `do_eval`
    return (RewardTrainer if args.step_separator is None else PRMTrainer)(
        model=model,
        args=args,
        train_dataset=pick_split(dataset, script_args.dataset_train_split, what),
        eval_dataset=pick_split(dataset, script_args.dataset_test_split, what, fix) if args.do_eval else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def first_row(trainer: RewardTrainer) -> str:
    """Return the answers and the labels of the first training row, one per line."""
    row = next(iter(cast(Any, trainer.train_dataset)))
    answers, labels = [repr(trainer.processing_class.decode(ids)) for ids in answers_of(row)], labels_of(row)
    names = [f"answers[{place}]" for place in range(len(answers))] if "grades" in labels else [*RAW_COLUMNS]
    values = [*zip(names, answers, strict=False), *sorted(labels.items())]
    return "\n".join(f"{name} of the first row: {value}" for name, value in values)


def write_run_report(trainer: RewardTrainer) -> None:
    """Write the page of `trl-tpu report` into the folder of a run that has ended and saved its model."""
    from trl_tpu.scripts.report import write_report

    folder = Path(str(trainer.args.output_dir))
    try:
        trainer.save_state()  # includes the logs of the last step and the last evaluation
        page, _ = write_report([folder])
        if (remote := trainer.trl_tpu.remote) is not None:
            remote.put(folder, [path.relative_to(folder).as_posix() for path in sorted(page.parent.iterdir())])
        print(f"Report written to {page}")
    except Exception as error:  # the model is saved, so a failed report must not fail the command
        logger.warning("There is no report on this run (%s: %s).", type(error).__name__, error)


def end_by_sigterm(args: RewardConfig, checkpoint: str | bool | None) -> None:
    """Make a SIGTERM before training exit with the status of an unfinished run, as a SIGTERM during training does.

    If the run does not resume a checkpoint, the folder is claimed for a new run that has no checkpoint yet.
    """

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM kills
        if checkpoint is None:
            remote = None if args.output_url is None else RemoteRun(args.output_url)
            folder = RunFolder(Path(str(args.output_dir)), remote, args.should_save)
            folder.claim()
            folder.begin(None)
            folder.release()
        how = "without changes" if isinstance(checkpoint, str) else "with --resume_from_checkpoint true"
        logger.error(f"SIGTERM came before training. Start the same command again, {how}.")
        raise SystemExit(UNFINISHED)

    end_forks_by_sigterm()
    signal.signal(signal.SIGTERM, end)


def model_init_kwargs(model_args: ModelConfig, training_args: RewardConfig) -> dict[str, Any]:
    """Merge the arguments for loading the model: ``model_init_kwargs`` takes precedence over flags."""
    kwargs: dict[str, Any] = {"revision": model_args.model_revision, "dtype": model_args.dtype}
    if model_args.attn_implementation is not None:
        kwargs["attn_implementation"] = model_args.attn_implementation
    kwargs["trust_remote_code"] = training_args.trust_remote_code
    return kwargs | cast(Any, training_args.model_init_kwargs or {})


def held_out_table(metrics: dict[str, float]) -> str:
    """Format accuracy, loss, margin and reward statistics on the held-out split, one per line.

    Args:
        metrics: Result of `RewardTrainer.evaluate`; keys begin with ``eval_``.
    """
    rows = ("accuracy", "loss", "margin", "mean_reward", "min_reward", "max_reward")
    lines = [f"  {name:<12} {metrics[f'eval_{name}']:>9.4f}" for name in rows if f"eval_{name}" in metrics]
    return "\n".join(["Held-out data", *lines])


def make_parser(
    prog: str | None = None,
    config: type[RewardConfig] = RewardConfig,
    script: tuple[type, ...] = (RewardScriptArguments,),
) -> TrlParser:
    """Make the parser of the command's flags, or the parser of another command that also takes training flags.

    Args:
        prog: Name of the command.
        config: Class of the training settings.
        script: Other dataclasses of flags; the flags of the first are shown by ``--help``.
    """
    first = (*_MAIN_FLAGS, *script[0].__annotations__)
    parser = CommandParser((*script, config, ModelConfig, DatasetMixtureConfig), first, prog)
    if config.step_separator is not None:
        parser.set_defaults(lora_task_type="TOKEN_CLS")
    return parser


def run(argv: list[str], config: Mapping[str, Any] | None = None, parser: TrlParser | None = None) -> int:
    """Run the command ``trl-tpu reward``, or a command with another parser; return the exit status.

    Args:
        argv: The arguments after the command's name.
        config: Values of the YAML file, if `argv` no longer names it.
        parser: Parser of the command; by default the parser of ``trl-tpu reward``.
    """
    parser = parser or make_parser("trl-tpu reward")
    script_args, training_args, model_args, dataset_args = parser.parse_args_and_config(argv, config=config)
    with flush_denormals():  # before torch starts threads, which do the same
        main(script_args, training_args, model_args, dataset_args, dry_run=script_args.dry_run)
    return 0


def run_prm(argv: list[str], config: Mapping[str, Any] | None = None) -> int:
    """Run the command ``trl-tpu prm``: like `run`, with the flags of `PRMConfig`."""
    return run(argv, config, make_parser("trl-tpu prm", PRMConfig))
