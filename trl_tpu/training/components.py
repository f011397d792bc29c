"""The parts that `DeviceTrainer` has, and what of them a checkpoint holds."""

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..checkpoint.checkpointer import Checkpointer, CheckpointLoader
from ..checkpoint.folders import RemoteRun, RunFolder
from ..config.reward_config import RewardConfig
from ..data.measure import is_prepared, measure
from ..errors import UserError
from ..runtime import current
from .batch_plan import BatchPlan
from .optimizer import StepState
from .progress import RecompileGuard
from .statistics import StepStatistics
from .step import Loss, StepResult
from .stopping import HostAgreement, Preemption, Unfinished

_SETTINGS = (
    *("seed", "data_seed", "gradient_accumulation_steps", "group_by_prompt"),
    *("learning_rate", "learning_rate_end", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *(field.name for field in fields(Loss)),
    *("attributes", "attribute_loss_weights", "margin_scale", "average_over", "disable_dropout", "frozen_parameters"),
    *("bf16", "nonfinite_limit"),
)
"""Settings on which the numbers of a step depend."""


def check_alike(runs: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError if hosts were started with different arguments, data or checkpoints.

    Args:
        runs: Of each host, by name, what has to be the same on all.
    """
    faults = []
    for name in runs[0]:
        hosts_of: dict[str, list[int]] = {}
        for host, run in enumerate(runs):
            hosts_of.setdefault(json.dumps(run[name], default=str), []).append(host)
        if len(hosts_of) > 1:
            faults.append(f"{name} is " + " and ".join(f"{value} on {_named(on)}" for value, on in hosts_of.items()))
    if faults:
        raise UserError(
            f"All hosts must train the same run, but {'; '.join(faults)}. Start the same command on every host, with "
            "the same data, and an output_dir that all of them share."
        )


def order_of_pairs(args: Any, processes: int, train_dataset: Any) -> dict[str, Any]:
    """Return everything that each step's numbers depend on: settings, batch size and training data."""
    order = {name: getattr(args, name) for name in _SETTINGS}
    return order | {"the batch": args.train_batch_size * processes, "training data": digest(train_dataset)}


def describe_run(args: Any, eval_dataset: Any, resume: str | bool | None) -> dict[str, Any]:
    """Return the mesh, evaluation data and checkpoints, which have to be the same on every host of a mesh too."""
    return {
        "mesh": str(args.mesh_shape),
        "eval data": digest(eval_dataset),
        "the checkpoint to resume from": Path(resume).name if isinstance(resume, str) else bool(resume),
        "the checkpoints": sorted(path.name for path in Path(str(args.output_dir)).glob("checkpoint-*")),
    }


def digest(dataset: Any) -> Any:
    """Return the number of pairs and their checksum; None for a stream; for a dict, that of each dataset."""
    if isinstance(dataset, dict):
        return {name: digest(part) for name, part in dataset.items()}
    if not is_prepared(dataset):
        return None
    return f"{len(dataset)} pairs ({measure(dataset).checksum:08x})"


def _named(hosts: list[int]) -> str:
    more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    return f"{'host' if len(hosts) == 1 else 'hosts'} {', '.join(map(str, hosts[:8]))}{more}"


def keeps_state(accelerator: Accelerator) -> bool:
    """Return whether we save the state of training; accelerate's FSDP and DeepSpeed do so themselves."""
    plugins = ("fsdp_plugin", "deepspeed_plugin")
    return all(getattr(accelerator.state, plugin, None) is None for plugin in plugins)


def is_users(method: Any) -> bool:
    """Return whether a trainer's method was written by a user: not by this package or transformers."""
    return getattr(method, "__module__", "").partition(".")[0] not in (__package__.partition(".")[0], "transformers")


class Components:
    """The parts of a trainer that this package adds to `transformers.Trainer`.

    Args:
        args: Of the trainer.
        model: Of the trainer.
        accelerator: Of the trainer.
        batch_plan: The layout of batches.
        statistics: Sums over training steps.
        announce: Told what is being compiled.

    Raises:
        UserError: Checkpoints would go to a URL in parts of every process, or this one would take several GPUs.
    """

    def __init__(
        self,
        args: RewardConfig,
        model: nn.Module,
        accelerator: Accelerator,
        batch_plan: BatchPlan,
        statistics: StepStatistics,
        announce: Callable[[str], None],
    ) -> None:
        self.runtime = runtime = current()
        self.batch_plan, self.statistics = batch_plan, statistics
        self.remote = None if args.output_url is None else RemoteRun(args.output_url)
        if self.remote is not None and not keeps_state(accelerator):
            raise UserError(
                f"FSDP and DeepSpeed of accelerate write a part of a checkpoint in every process, and a URL, "
                f"{args.output_url}, is written to from one. Give a folder that all processes share as output_dir."
            )
        if args.n_gpu > 1:  # which is 1 for a model that is split across GPUs
            raise UserError("nn.DataParallel is not supported: launch a process a GPU (torchrun), or show it one GPU.")
        shares_disk = self.remote is None and not args.save_on_each_node
        self.agreement = HostAgreement(runtime, accelerator)
        self.preemption = Preemption(args.time_limit, args.save_interval)
        in_float16 = args.mixed_precision == "fp16" or any(each.dtype == torch.float16 for each in model.parameters())
        statistics.judges_steps = keeps_state(accelerator) and not in_float16
        self.recompiles = RecompileGuard(runtime, announce)
        self.checkpointer = Checkpointer(
            runtime, self.agreement, writes=args.should_save, shares_disk=shares_disk, limit=args.save_total_limit
        )
        self.checkpoints = CheckpointLoader(runtime, self.agreement, shares_disk=shares_disk)
        self.run_folder = RunFolder(Path(str(args.output_dir)), self.remote, args.should_save)
        self.step_state = StepState(runtime, scanned=args.remat_policy if args.scan_layers else None)
        self.best_model_lost: str | None = None
        """Why the last `train()` ended with its last model instead of its best; None if it did not."""
        self.at_late_sigterm: Callable[[], None] = partial(signal.raise_signal, signal.SIGTERM)
        """Called where a SIGTERM came too late for training to stop."""
        self.order: dict[str, Any] = {}
        """See `order_of_pairs`."""
        self.build: Any = None
        """Makes a reward model of the return value of `model_init`."""
        self.date: str | None = None
        """The date in conversations, where the chat template writes one."""
        self.seen: Mapping[int, tuple[int, ...]] = {}
        """Prompts of evaluation data that are in the training data, by the `id` of a dataset."""
        self.labels: Any = None
        """The form of the labels of the last evaluated batch, a `Labels` without grades."""
        self.last_step: StepResult | None = None
        """The last result of our loss, for methods of subclasses that do not return it."""

    def unfinished(self, reason: str) -> Unfinished:
        """Return what to raise after a stop."""
        latest = self.checkpointer.latest
        return Unfinished(reason, latest, latest not in self.checkpointer.failed)
