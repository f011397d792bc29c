"""Parts of a trainer, under one attribute, so that subclasses can use any other name."""

import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..batching.batch_plan import BatchPlan
from ..checkpoint.loader import CheckpointLoader
from ..checkpoint.remote import RemoteRun
from ..checkpoint.run_folder import RunFolder
from ..checkpoint.saver import Checkpointer
from ..config.reward_config import RewardConfig
from ..errors import UserError
from ..runtime import current
from .agreement import HostAgreement
from .contents import keeps_state
from .log_interval import LogInterval
from .metrics import RewardMetrics
from .nonfinite import NonfiniteGuard, computes_in_float16
from .preemption import Preemption, Unfinished
from .recompile_guard import RecompileGuard
from .step import StepResult
from .step_state import StepState


class Components:
    """The parts of a trainer, made of what `transformers.Trainer` has set.

    Args:
        args: The trainer's.
        model: The trainer's.
        accelerator: The trainer's.
        batch_plan: How batches are laid out.
        metrics: What steps add up beside the loss.
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
        metrics: RewardMetrics,
        announce: Callable[[str], None],
    ) -> None:
        self.runtime = runtime = current()
        self.batch_plan, self.metrics = batch_plan, metrics
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
        limit = args.nonfinite_limit if keeps_state(accelerator) and not computes_in_float16(args, model) else 0
        self.nonfinite = NonfiniteGuard(limit, runtime, args.device, accelerator)
        self.log_interval = LogInterval(runtime, args.device, accelerator, metrics, self.nonfinite)
        self.recompiles = RecompileGuard(runtime, announce)
        self.checkpointer = Checkpointer(
            runtime, self.agreement, writes=args.should_save, shares_disk=shares_disk, limit=args.save_total_limit
        )
        self.checkpoints = CheckpointLoader(runtime, self.agreement, shares_disk=shares_disk)
        self.run_folder = RunFolder(Path(str(args.output_dir)), self.remote, args.should_save)
        self.step_state = StepState(runtime, scanned=args.remat_policy if args.scan_layers else None)
        self.best_model_lost: str | None = None
        """Why the last `train()` ended with its last model in the place of its best; None if it did not."""
        self.at_late_sigterm: Callable[[], None] = partial(signal.raise_signal, signal.SIGTERM)
        """What is done where a SIGTERM came too late for training to stop."""
        self.order: dict[str, Any] = {}
        """What each step of this training depends on."""
        self.build: Any = None
        """Makes a reward model of what `model_init` returns."""
        self.date: str | None = None
        """The date that the chat template has written into conversations."""
        self.seen: Mapping[int, tuple[int, ...]] = {}
        """Prompts of evaluation data that are in the training data, by the `id` of a dataset."""
        self.evaluated: Any = None
        """The dataset of the last evaluation."""
        self.labels: Any = None
        """The form of its labels."""
        self.last_step: StepResult | None = None
        """What our loss computed last, for methods of subclasses that do not return it."""

    def unfinished(self, reason: str) -> Unfinished:
        """Return what to raise after a stop."""
        latest = self.checkpointer.latest
        return Unfinished(reason, latest, latest not in self.checkpointer.failed)
