"""transformers' training loop with its edges replaced: placement, precision, loading, the step, logging, state.

The loop itself is `transformers.Trainer`'s. Where its edges would stop an XLA device, compile a step anew or store
state whole on every device, they are overridden here; on plain torch most overrides pass through.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers.trainer
from accelerate.utils import gather_object
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..data.collators import PairRows
from ..data.loader import host_batches, outlive_sigterm, read_own, skip_batches, training_order
from ..modeling.stacked import LayerStack
from ..parallel.rules import Rules
from ..parallel.shard import divide_feed_forward, keep_activations_split, place_model, plan_model, scatter_gradients
from ..parallel.shard_report import ShardReport
from ..runtime import PartitionSpec, Remat
from .metrics import RewardMetrics, RewardSums, on_host
from .nonfinite import DeviceSkip
from .optimizer import GradientBuffers, passes_of, prepare_optimizer
from .recompile_guard import RecompileGuard
from .skipping import SkippingTrainer


class DeviceTrainer(SkippingTrainer):
    """A Trainer whose every step is one program on the device.

    Subclasses set `runtime`, `mesh` and `compute_dtype` before calling ``super().__init__``.
    """

    sharding_rules: Rules | None = None
    compute_dtype: torch.dtype | None
    remat: Remat = Remat.FULL
    scan_layers: bool = False
    model: PreTrainedModel  # or one of peft, which hands its attributes on
    shard_report: ShardReport | None = None
    _stack: LayerStack | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reward_metrics = RewardMetrics(self.runtime, self.args.device, self.nonfinite_limit)
        self._gradients: GradientBuffers | None = None
        self._prepared_optimizer: torch.optim.Optimizer | None = None
        self._guard = RecompileGuard(self.runtime, None)  # training begins with one that knows its plan
        self.add_callback(_StepEdges(self))

    @property
    def planned_shapes(self) -> int | None:
        """How many batch shapes training will see, where that is planned."""
        return None

    @property
    def has_partial_passes(self) -> bool:
        """Whether some batches take passes that only add up gradients."""
        return False

    # ---- placement and precision

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Keep precision out of accelerate: on a TPU it would store every float32 tensor as bfloat16."""
        built = super()._build_accelerator_args(**kwargs)
        if built["mixed_precision"] == "bf16":
            built["mixed_precision"] = "no"
        if built["dataloader_config"].dispatch_batches is None:
            # for a stream accelerate would make batches on one process and cut them up for the others
            built["dataloader_config"].dispatch_batches = False
        return built

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        stack = super().compute_loss_context_manager()
        stack.enter_context(self.runtime.autocast(self.compute_dtype, self.args.device))
        return stack

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        plan = plan_model(model, self.mesh, self.sharding_rules)
        plan.check(name for name, _ in model.named_parameters())
        if not self.runtime.shares_mesh:
            super()._move_model_to_device(model, device)
        self.shard_report = place_model(model, plan, self.runtime, device)
        if self.runtime.shares_mesh:
            keep_activations_split(model, plan, self.shard_report.placements, self.runtime)
            scatter_gradients(model, plan, self.shard_report.placements, self.runtime)
            if self.remat == "full":
                divide_feed_forward(model, plan, self.shard_report.placements, self.runtime)

    # ---- loading

    def device_collator(self, dataset: Any, batch_size: int) -> Callable[[list[Any]], Any]:
        """What turns examples into a batch for the device; the collator itself unless a subclass plans shapes."""
        return self.data_collator

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        """On XLA, our own loader: accelerate's replicates every batch and forgets its settings on resume."""
        collate: Any = self.device_collator(dataset, batch_size)
        if not self.runtime.shares_mesh:
            with _collating(self, collate):
                loader = super()._get_dataloader(
                    dataset, description, batch_size, sampler_fn, is_training, dataloader_key=dataloader_key
                )
            inner = getattr(loader, "base_dataloader", loader)  # accelerate's holds torch's
            inner.worker_init_fn = partial(outlive_sigterm, inner.worker_init_fn)
            return loader
        if hasattr(dataset, "remove_columns") and not isinstance(dataset, torch.utils.data.IterableDataset):
            dataset = self._remove_unused_columns(dataset, description=description)
        sampler = None
        if not isinstance(dataset, torch.utils.data.IterableDataset) and sampler_fn is not None:
            sampler = training_order(dataset, sampler_fn(dataset), self.args.data_seed)
        own_rows = self.host.rows(batch_size, self.mesh)
        if len(own_rows) < batch_size and isinstance(collate, PairRows) and isinstance(dataset, Dataset):
            dataset, collate = read_own(dataset, collate, own_rows)
        batches = host_batches(dataset, collate, batch_size, sampler, self.args)
        return self.runtime.loader(batches, self.mesh.batch_axes)  # type: ignore[return-value]

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # A resumed epoch skips batches through accelerate, which rebuilds the loader without its sharding.
        with _skipping(self._skip_batches) if self.runtime.shares_mesh else contextlib.nullcontext():
            super()._run_epoch(*args, **kwargs)

    def _skip_batches(self, loader: Any, count: int) -> Any:
        return self.runtime.loader(skip_batches(loader.batches, count), self.mesh.batch_axes)

    # ---- the step

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Also the moment when the optimizer is final and nothing is loaded into it yet: create its state, once."""
        torch_optimizer = self._torch_optimizer
        if self.scan_layers:
            self._layer_stack().stack(torch_optimizer)
        if self.runtime.compiles and torch_optimizer is not self._prepared_optimizer:
            prepare_optimizer(torch_optimizer, self.runtime, self._parameter_axes())
            accumulates = self._accumulates or self.has_partial_passes
            self._gradients = GradientBuffers(torch_optimizer, self.runtime) if accumulates else None
            if self.skips_nonfinite:
                DeviceSkip(torch_optimizer, self.reward_metrics.steps, self.runtime)
            self._prepared_optimizer = torch_optimizer
        return super().create_scheduler(num_training_steps, optimizer)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        position = super()._init_training_state(*args, **kwargs)
        # a resumed run compares this with its own argument, and would warn of a change on every mesh
        self.state.train_batch_size = self.args.per_device_train_batch_size
        return position

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self.runtime.recompute_layers(self.model, self.remat)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _parameter_axes(self) -> dict[nn.Parameter, PartitionSpec]:
        """The mesh axes that the dimensions of the model's parameters, as they are now, go over."""
        placements = self.shard_report.placements if self.shard_report is not None else {}
        axes = {parameter: placements[name].axes for name, parameter in self.model.named_parameters()}
        return axes | (self._stack.axes if self._stack is not None else {})

    def _layer_stack(self) -> LayerStack:
        if self._stack is None or self._stack.model is not self.model:
            placements = self.shard_report.placements if self.shard_report is not None else {}
            axes = {name: placement.axes for name, placement in placements.items()}
            self._stack = LayerStack(self.model, axes, self.remat, self.runtime)
        return self._stack

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._stack.one_by_one() if self._stack is not None else contextlib.nullcontext():
            super()._load_optimizer_and_scheduler(checkpoint)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._unstack()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._unstack()  # before the best model is loaded and callbacks look at the model
        return super()._finalize_training(*args, **kwargs)

    def _unstack(self) -> None:
        if self._stack is not None:
            self._stack.unstack()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch, in one or several passes, whose gradients add up and whose losses do."""
        *partial, final = passes_of(inputs)
        self._end_micro_batch()
        for rows in partial:
            self._tr_loss += self._pass(model, rows, num_items_in_batch)
            self.runtime.step_boundary()
        return self._pass(model, final, num_items_in_batch)

    def _pass(self, model: nn.Module, rows: dict[str, Any], num_items_in_batch: Any) -> torch.Tensor:
        self._guard.see(rows)
        if self._gradients is not None:
            self._gradients.attach()
        return super().training_step(model, rows, num_items_in_batch)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return sum(super(DeviceTrainer, self).floating_point_ops(rows) for rows in passes_of(inputs))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            self._end_micro_batch()
        return super()._get_grad_norm(model, grad_norm)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self._end_micro_batch()
        return super()._clip_grad_norm(model)

    @property
    def _accumulates(self) -> bool:
        return self.args.gradient_accumulation_steps > 1

    def _end_micro_batch(self) -> None:
        """Execute each micro-batch on its own, or all of a step would unroll into one long program.

        Called before the next micro-batch and before the update, not after the micro-batch: the loop adds up its loss
        after `training_step`, and that belongs to the same program.
        """
        if self._accumulates:
            self.runtime.step_boundary()

    # ---- logging: one stop of the device per log

    def _log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._log_step(tr_loss, grad_norm, start_time, learning_rate)
        self._guard.pause()
        super()._log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
        )
        self._guard.resume()

    def _log_step(
        self, tr_loss: torch.Tensor, grad_norm: torch.Tensor | float | None, start_time: float, rate: float | None
    ) -> None:
        self.runtime.step_boundary()
        norm = grad_norm if isinstance(grad_norm, torch.Tensor) else torch.tensor(float(grad_norm or 0.0))
        counts = self.reward_metrics.steps.device_counts
        loss, norm, counts, *sums = self.runtime.fetch([tr_loss, norm, counts, *self.reward_metrics.device_sums])
        open_sums, loss_sum = self._over_processes(on_host(sums), loss.item())
        self.reset_loss()
        counted = self.reward_metrics.steps.close(counts)
        steps = self.state.global_step - self._globalstep_last_logged - counted.nonfinite
        logs = {"loss": loss_sum / steps} if steps else {}
        if grad_norm is not None and not counted.in_a_row:
            logs["grad_norm"] = norm.item()
        logs["learning_rate"] = self._get_learning_rate() if rate is None else rate
        logs |= self.reward_metrics.close(open_sums)
        if self.skips_nonfinite:
            logs["nonfinite"] = counted.nonfinite
        self._total_loss_scalar += loss_sum
        self._globalstep_last_logged = self.state.global_step
        self.store_flos()
        self.log(logs, start_time)
        self.stop_if_nonfinite(counted)

    def _over_processes(self, sums: RewardSums, loss: float) -> tuple[RewardSums, float]:
        """Sum the metrics and average the loss over accelerate's processes (on XLA there is one, for all devices)."""
        if self.accelerator.num_processes == 1:
            return sums, loss
        everyone = gather_object([(sums, loss)])
        return sum((each for each, _ in everyone), RewardSums()), sum(each for _, each in everyone) / len(everyone)


class _StepEdges(TrainerCallback):
    """What has to happen inside the loop, at points where only callbacks are called."""

    def __init__(self, trainer: DeviceTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self._trainer
        trainer.runtime.step_boundary()  # what placed and loaded the model is no part of the first step
        trainer.reset_loss()
        trainer._resume_loss()
        if trainer.runtime.compiles:
            planned = trainer.planned_shapes
            trainer._guard = RecompileGuard(trainer.runtime, planned, shared_programs=int(trainer._accumulates))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.begin_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer._guard.check()


@contextlib.contextmanager
def _skipping(skip: Callable[[Any, int], Any]) -> Iterator[None]:
    """Let the loop skip batches through ``skip``; it calls a function by its module's name, not a method."""
    original = transformers.trainer.skip_first_batches
    transformers.trainer.skip_first_batches = skip
    try:
        yield
    finally:
        transformers.trainer.skip_first_batches = original


@contextlib.contextmanager
def _collating(trainer: Trainer, collate: Callable[[list[Any]], Any]) -> Iterator[None]:
    """Let ``trainer`` make a loader with ``collate``; transformers takes only the trainer's own collator."""
    own = trainer.data_collator
    trainer.data_collator = collate
    try:
        yield
    finally:
        trainer.data_collator = own
