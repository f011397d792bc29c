"""Train on any runtime, for any model and loss: the road of a run, the loop over its steps, and one step.

`DeviceTrainer.train` finds the checkpoint to resume from. transformers' `train` applies the settings to the model and
calls `_inner_training_loop`, which reads like this:

1. `_start`: the loader, the optimizer, the wrapped model and the schedule, made by transformers. Then
   `_place_training_state` recomputes layers, stacks them, and shards the optimizer's state. Then the state of
   the optimizer and the schedule is loaded; transformers' `train` has loaded the weights.
2. `_begin` (in `trl_tpu.training.saving`): statistics and counters.
3. `_train_epoch`: the batches of each update, callbacks, and what follows a step: votes, logs, evaluations, saves.
4. `_update`: one step. `trl_tpu.training_step` calls the same method.
5. `_finish`: the mean loss, the best model and the last save.

These overrides replace code that would stall an XLA device, recompile a step, replicate state on every device, or let
one host act alone. Overrides that save and load are in `trl_tpu.training.saving`, and overrides about rewards
(`compute_loss`, `prediction_step`, `evaluation_loop`, `call_model_init`, `log`, `create_model_card`) in
`trl_tpu.trainer`.

==================================  ==========================================================================
override                            purpose
==================================  ==========================================================================
train                               resume only from a complete checkpoint; handle SIGTERM; compare hosts
_inner_training_loop                take the steps of a run
_build_accelerator_args             turn off accelerate's mixed precision and batch dispatch
_move_model_to_device               shard the parameters
compute_loss_context_manager        compute in bfloat16 over float32 weights
_get_dataloader                     make batches of planned shapes; split them over the mesh; group prompts
create_scheduler                    end at `learning_rate_end`; check the schedule before training
training_step                       run a batch in one or several micro-batches
==================================  ==========================================================================
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import DistributedType, skip_first_batches
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import PrinterCallback, trainer
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.optimization import GreedyLR
from transformers.trainer_utils import has_length

from ..checkpoint.folders import RunFolder
from ..checkpoint.state_dict import gather_weights_on_save
from ..config.launchers import without_fsdp
from ..data import loader as loaders
from ..errors import UserError
from ..modeling.model_shape import flops_per_row
from ..modeling.recurrent_layers import recompute_in_same_batch
from ..packing.batch import Batch, micro_batches_of, tensors_in
from ..parallel import shard
from ..parallel.mesh import BATCH_AXES
from ..runtime import choice, current, flush_denormals
from ..runtime.native import DeviceLoader
from .batch_plan import BatchPlan
from .optimizer import create_schedule, gradient_norms, unwrap
from .progress import BusyCores, JsonLines, Progress
from .saving import Components, SavingTrainer, saves_state
from .statistics import StepCounts
from .stopping import SIGTERM, EvaluationInterrupted, Preemption

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """What the steps of a run need."""

    loader: Any
    epochs: int
    batches: int  # per epoch
    samples: float  # training rows, for the rates in the last log
    first_epoch: int
    skipped: int  # batches of the first epoch that the resumed checkpoint was trained on
    checkpoint: str | None
    trial: Any
    ignore_keys: list[str] | None  # of the model's output in evaluations
    start_time: float


class DeviceTrainer(SavingTrainer):
    """Trainer that runs each step as one program on the device and saves checkpoints atomically.

    This class handles batch shapes and metric sums. It does not depend on the meaning of the data or of the rewards.

    State that this package adds is in the attribute `trl_tpu` and in private methods. A subclass may use any other
    public name that is not documented here.

    Attributes:
        stopped_by: Reason the last `train()` stopped early: "training_time_limit" or "SIGTERM"; None if it finished.
        stop_checkpoint: Folder or URL of the last saved checkpoint. After an early stop it belongs to the last step.
    """

    shard_report: shard.ShardReport | None = None
    stopped_by: str | None = None
    stop_checkpoint = ""

    def _make_components(self, plan: BatchPlan) -> None:
        """Make the components. Call this after transformers' constructor."""
        self.trl_tpu = Components(self.args, self.model, self.accelerator, plan)
        shows_bar = self.pop_callback(trainer.DEFAULT_PROGRESS_CALLBACK) is not None  # notebooks have their own
        if self.args.progress == "json":
            self.pop_callback(PrinterCallback)
            self.add_callback(JsonLines())
        elif shows_bar:
            progress = Progress(self._opening)
            self.add_callback(progress)
            self.trl_tpu.announce = progress.say
        if self.args.device.type == "cpu" and torch.get_num_threads() > 1:
            self.add_callback(BusyCores())
        self.batch_plan = plan
        offload: Any = current().activations_on_host if self.args.activation_offloading else contextlib.nullcontext
        self.maybe_activation_offload_context = offload()  # TRL's name

    @property
    def _accumulates(self) -> bool:
        return self.args.gradient_accumulation_steps > 1

    def describe(self) -> str:
        """Describe the run for the start of a log: devices, mesh, sharding, precision, batches and shapes."""
        trained, total = self.get_num_trainable_parameters(), sum(map(torch.numel, self.model.parameters()))
        return (
            f"Training on {current().topology().description}: {choice().reason}\n"
            f"Computing in {precision_of(self.args, self.model)}; {trained:,} of {total:,} parameters train\n"
            f"{self.shard_report}\n"
            f"Batches of {self._train_batch_size} rows, {self.trl_tpu.batch_plan.layout}"
        )

    def _opening(self) -> str:
        """Return the first line of the log: the devices, and the layout of batches. Empty if it is known."""
        device, *_, batches = DeviceTrainer.describe(self).splitlines()  # a subclass may use the name
        return "" if self.trl_tpu.is_described else f"{device}. {batches}"

    # ---- the entry

    @without_fsdp()
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as transformers does, but resume only from a complete checkpoint. See also `stopped_by`.

        Args:
            resume_from_checkpoint: Folder or URL of a checkpoint. True selects the newest complete checkpoint in
                `output_dir`. "auto" resumes from the newest checkpoint and starts fresh if none exists. None reads
                `args.resume_from_checkpoint`, but only "auto" has an effect there.
            trial: Trial of a hyperparameter search.
            ignore_keys_for_eval: Keys of the model's output to ignore in evaluations, as in transformers.

        Raises:
            Unfinished: A SIGTERM stopped training.
            UserError: No checkpoint is complete, or the named checkpoint is damaged. With "auto", the newest
                checkpoint is damaged or belongs to another run. Or the hosts were started with different arguments,
                data or checkpoints.
        """
        ours = self.trl_tpu
        ours.preemption = preemption = Preemption(self.args)
        if resume_from_checkpoint is None and self.args.resume_from_checkpoint == "auto":
            resume_from_checkpoint = "auto"  # other values are ignored, as in transformers' `train`
        with preemption.handle_sigterm(listens=not self.args.enable_jit_checkpoint):
            ours.best_model_lost = None
            ours.run_folder = run = RunFolder(Path(self._get_output_dir(trial)), ours.remote, self.args.should_save)
            try:
                checkpoint = self._find_checkpoint(run, resume_from_checkpoint)
                output = super().train(checkpoint, trial, ignore_keys_for_eval)
            finally:
                ours.step_state.unstack()
                ours.checkpoints.download.close()
                ours.checkpointer.wait()  # before another run can lock the folder
                run.release()
                self.stopped_by, self.stop_checkpoint = preemption.stopped_by, ours.checkpointer.latest
        if self.state.global_step == 0 and preemption.stopped_by is None:
            raise UserError("Training took no step: provide rows, and set max_steps or num_train_epochs above 0.")
        # after a time limit a SIGTERM may have reached only some ranks: all raise together
        if preemption.stopped_by is not None and any(ours.agreement.all_gather_object(preemption.is_preempted)):
            raise ours.unfinished(SIGTERM)
        if preemption.is_preempted:  # after the last step: training is complete, so handle the signal as usual
            ours.at_late_sigterm()
        return output

    # ---- placement and precision

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**kwargs)
        if built["mixed_precision"] == "bf16":
            built["mixed_precision"] = "no"  # on a TPU accelerate would store every float32 tensor as bfloat16
        if self.args.torch_compile:
            built["dynamo_plugin"] = TorchDynamoPlugin(backend="no")  # layers are compiled one by one
        built.pop("parallelism_config", None)  # accelerate would reject the `tensor` axis on a CPU
        # accelerate cannot split our batches by rows of the data: each process makes its own, the same number on all
        built["dataloader_config"].dispatch_batches, built["dataloader_config"].even_batches = False, True
        return built

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        stack = super().compute_loss_context_manager()
        if self.args.bf16:
            stack.enter_context(torch.autocast(self.args.device.type, dtype=torch.bfloat16))
        stack.enter_context(self.maybe_activation_offload_context)
        return stack

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        loaded, args = shard.mesh_of(model), self.args
        if loaded is not None:  # the user has loaded the model in shards
            if loaded.sizes != args.mesh_shape.sizes and (args.mesh or (loaded.tensor > 1 and args.total_batch_size)):
                raise UserError(
                    f"The model is on the mesh '{loaded}', not on '{args.mesh_shape}': set mesh='{loaded}'."
                )
            args.mesh_shape = loaded
        if self.args.shards_over_processes:
            self.shard_report = shard.shard_model(model, self.args.mesh_shape, current(), device)
            return
        runtime = current()  # `self.trl_tpu` does not exist yet: transformers' constructor calls this method
        if not runtime.is_spmd:
            super()._move_model_to_device(model, device)
        plan = shard.plan_model(model, args.mesh_shape, args.sharding_rules)
        self.shard_report = shard.place_model(model, plan, runtime, device)
        if runtime.is_spmd:
            shard.shard_activations(model, plan, self.shard_report.placements, runtime)
            if runtime.topology().process_count == 1:  # with several, all would have to gather together
                gather_weights_on_save(model, runtime)

    # ---- batches

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        runtime, parts = current(), self._batch_parts
        if description == "Evaluation" and (steps := self.args.max_eval_steps) is not None:
            rows = steps * batch_size * (1 if self.accelerator.split_batches else parts)
            dataset = dataset.take(min(rows, len(dataset)) if has_length(dataset) else rows)
        collate = self.trl_tpu.batch_plan.collator(dataset, batch_size, self.data_collator)
        is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
        if is_training and self.args.group_by_prompt:
            sampler_fn = partial(loaders.prompt_group_sampler, sampler_fn, self.args, parts)
        if not current().shards_model:
            if is_stream and parts > 1:
                as_list = self._get_collator_with_removed_columns(list, description)
                collate = partial(loaders.collate_marked, collate, as_list)
                dataset = loaders.UnsplitStream(dataset, 1 if is_training else batch_size * parts)
            collator, self.data_collator = self.data_collator, collate  # transformers' method reads this attribute
            try:
                loader: Any = super()._get_dataloader(
                    dataset, description, batch_size, sampler_fn, is_training, dataloader_key=dataloader_key
                )
            finally:
                self.data_collator = collator
            inner = getattr(loader, "base_dataloader", loader)  # accelerate wraps torch's loader
            inner.worker_init_fn = partial(loaders.ignore_foreign_sigterm, inner.worker_init_fn)
            return loader
        if is_stream:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        else:
            dataset = self._remove_unused_columns(dataset, description=description)
        sampler = None if is_stream or sampler_fn is None else sampler_fn(dataset)
        batches = loaders.host_batches(dataset, collate, batch_size * parts, sampler, self.args)
        return DeviceLoader(runtime, batches, BATCH_AXES)

    # ---- a run

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Take the steps of a run. transformers' `train` calls this once it has applied the settings to the model."""
        self.accelerator.free_memory()
        if self.args.auto_find_batch_size:
            self._update_auto_batch_size(batch_size)
        run = self._start(resume_from_checkpoint, trial, ignore_keys_for_eval)
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        self._begin()
        if self.args.eval_on_start:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        for epoch in range(run.first_epoch, run.epochs):
            if self.state.global_step >= self.state.max_steps:  # a run resumed at its end
                break
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
            self._train_epoch(run, epoch)
            if self.control.should_training_stop:
                break
        return self._finish(trial, run.samples, run.start_time)

    def _start(self, checkpoint: str | None = None, trial: Any = None, ignore_keys: list[str] | None = None) -> Run:
        """Make everything that the first step needs, and load the checkpoint's optimizer and schedule."""
        loader = self.get_train_dataloader()
        epochs, updates, _, samples, _, batches, max_steps = self.set_initial_training_values(self.args, loader)
        first_epoch, skipped = self._init_training_state(max_steps, updates, epochs, checkpoint, trial)
        shard.reshard(self.model)  # an evaluation before training may have left weights gathered
        # now, as sharding and stacking change the shapes of weights
        self.trl_tpu.statistics.flops_per_row = flops_per_row(self.model, self.train_dataset)
        is_ours = saves_state(self.accelerator)
        model, loader = self._prepare_for_training(max_steps, loader, None if is_ours else checkpoint)
        self._place_training_state()
        if is_ours and checkpoint is not None:
            self._load_optimizer_and_scheduler(checkpoint)
            self._load_scaler(checkpoint)
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self.state.global_step
        model.zero_grad()
        logger.info("Training %s of %s steps, %s per epoch", max_steps - self.state.global_step, max_steps, updates)
        numbers = epochs, cast(int, batches), samples, first_epoch, skipped
        return Run(loader, *numbers, checkpoint, trial, ignore_keys, start_time=time.time())

    def _place_training_state(self) -> None:
        """Let layers recompute, stack them into a loop, and create and shard the optimizer's state.

        At this point the optimizer is final and no checkpoint has been loaded into it.
        """
        ours, optimizer = self.trl_tpu, unwrap(self.optimizer)
        ours.runtime.recompute_layers(self.model, self.args.remat_policy)
        recompute_in_same_batch(self.model)
        if self.args.torch_compile:  # one program for all layers and shapes
            how: Any = {"backend": self.args.torch_compile_backend, "mode": self.args.torch_compile_mode}
            layers = [each for each in self.model.modules() if isinstance(each, GradientCheckpointingLayer)]
            for module in layers or (self.model,):
                module.compile(dynamic=True, **how)
        # not read on other devices: a subclass may use the name
        placements = cast(shard.ShardReport, self.shard_report).placements if ours.runtime.is_spmd else {}
        accumulates = self._accumulates or ours.batch_plan.layout.accumulates
        ours.step_state.prepare(self.model, optimizer, placements, accumulates)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = create_schedule(self.args, optimizer or self.optimizer, num_training_steps)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    # ---- an epoch

    def _train_epoch(self, run: Run, epoch: int) -> None:
        """Take the steps of an epoch; in the first epoch of a resumed run, those that are left."""
        args, accumulated, loader, done = self.args, self.args.gradient_accumulation_steps, run.loader, 0
        resumed = run.checkpoint if epoch == run.first_epoch else None
        if resumed is not None and run.skipped:
            loader, done = self._skip_batches(loader, run.skipped), run.skipped
        elif resumed is not None:
            self._load_random_state(resumed)
        loaders.begin_epoch(loader, epoch)
        batches, norm, rate = iter(loader), None, None
        while done < run.batches:
            update, items = self.get_batch_samples(batches, min(accumulated, run.batches - done), args.device)
            if resumed is not None and done == run.skipped > 0:  # fetching the first batch has drawn random numbers
                self._load_random_state(resumed)
            if not update:  # a stream has ended
                break
            done += len(update)
            # a stream may end before its last update is complete; the gradients stay for the next epoch
            completes = done % accumulated == 0 or done == run.batches
            if (step := self._update(update, items, completes)) is not None:
                norm, rate = step
                self.state.epoch = epoch + done / run.batches
                self.control = self.callback_handler.on_step_end(args, self.state, self.control)
                self.trl_tpu.recompiles.check(self.state.global_step)
                self._end_step(run, epoch, norm, rate)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.trl_tpu.runtime.step_boundary()  # execute what an early end has left
        if not done:
            logger.warning("The training data has no batch, so training stops at step %s.", self.state.global_step)
            self.control.should_training_stop = True
        self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
        self._end_step(run, epoch, norm, rate)

    def _skip_batches(self, loader: Any, count: int) -> Any:
        if not current().shards_model:
            return skip_first_batches(loader, count)
        # accelerate would rebuild the loader without its sharding, and may have wrapped a user-defined loader
        batches = loaders.skip_batches(getattr(loader, "dataloader", loader), count)
        return DeviceLoader(self.trl_tpu.runtime, batches, BATCH_AXES)

    def _load_random_state(self, checkpoint: str) -> None:
        try:
            self._load_rng_state(checkpoint)
        except KeyError as error:  # checkpoints of TRL may have no random state of this device
            if error.args != (self.args.device.type,):
                raise
            logger.warning("%s has no random state for this device: random numbers will differ.", checkpoint)

    # ---- the step

    @flush_denormals()
    def _update(self, batches: Sequence[Any], items: Any = None, completes: bool = True) -> tuple[Any, float] | None:
        """Accumulate the gradients of some batches, and update the weights.

        Args:
            batches: The batches of one update. Their gradients are averaged.
            items: transformers' `num_items_in_batch`, for a user-defined loss.
            completes: False if the update is not complete with these batches: their gradients are kept.

        Returns:
            Gradient norm before clipping and learning rate of the update; None without an update.
        """
        args, ours, accelerator, events = self.args, self.trl_tpu, self.accelerator, self.callback_handler
        model, optimizer, schedule = self.model_wrapped, cast(Any, self.optimizer), cast(Any, self.lr_scheduler)
        self.current_gradient_accumulation_steps = self._divisor(len(batches))  # transformers' training_step reads it
        for number, inputs in enumerate(batches, start=1):
            is_last = number == len(batches)
            accelerator.gradient_state._set_sync_gradients(is_last and completes)
            if number == 1:
                self.control = events.on_step_begin(args, self.state, self.control)
            with self._gradient_sync(model, is_last):
                self._add_loss(self.training_step(model, inputs, items))
            if self._accumulates:  # else the batches of a step would be one long program
                ours.runtime.step_boundary()
            self._count(inputs)
            if not (is_last and completes):
                self.control = events.on_substep_end(args, self.state, self.control)
                ours.agreement.postpone(self.control)
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    return None
        if not completes:
            return None
        if args.log_grad_norms:
            ours.gradient_norms = gradient_norms(self.model)
        norm = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        norm = shard.full_tensor(self._get_grad_norm(model, grad_norm=norm))
        is_finite_1 = ours.statistics.check_step(norm)
        self.control = events.on_pre_optimizer_step(args, self.state, self.control)
        with ours.step_state.update(is_finite_1):
            optimizer.step()  # without effect if the step is nonfinite
        self.control = events.on_optimizer_step(args, self.state, self.control)
        rate = self._get_learning_rate()
        follows_metrics = isinstance(schedule, ReduceLROnPlateau | GreedyLR)  # evaluations step it
        if not accelerator.optimizer_step_was_skipped and not follows_metrics:
            schedule.step()
        model.zero_grad()
        self.state.global_step += 1
        return norm, rate

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a batch in one or several micro-batches, and accumulate their gradients and losses."""
        ours, parts = self.trl_tpu, micro_batches_of(inputs)
        for number, part in enumerate(parts, start=1):
            is_last = number == len(parts)
            ours.recompiles.see(tensors_in(part), updates=is_last or self._accumulates)
            ours.step_state.attach_gradients()
            loss = super().training_step(model, part, num_items_in_batch)
            if not is_last:
                self._add_loss(loss)
                ours.runtime.step_boundary()
        return loss

    def _divisor(self, batches: int) -> Any:
        """Return the number of batches that an update's loss is divided by.

        On compiled devices it is a tensor: a number would be part of the program, and an update with fewer batches, at
        the end of an epoch, would compile another one.
        """
        runtime = self.trl_tpu.runtime
        if not (self._accumulates and runtime.plans_shapes):
            return batches
        return runtime.to_device(torch.tensor(float(batches)), self.args.device)

    def _gradient_sync(self, model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context that reduces gradients over processes only in the last batch of an update."""
        accelerator = self.accelerator
        syncs_each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if is_last or syncs_each or accelerator.distributed_type == DistributedType.DEEPSPEED:
            return contextlib.nullcontext()
        if self.is_distributed_loading_by_transformers and is_fsdp_managed_module(self.model):
            return self._defer_fsdp_gradient_reduction()
        return accelerator.no_sync(model)

    def _add_loss(self, loss: torch.Tensor) -> None:
        statistics, runtime = self.trl_tpu.statistics, self.trl_tpu.runtime
        # `check_step` excludes nonfinite steps without reading the device
        is_filtered = self.args.logging_nan_inf_filter and not statistics.limit and not runtime.is_spmd
        if is_filtered and not loss.isfinite():
            total_1 = statistics.loss_sum_1 + statistics.step_loss_1
            loss = total_1 / (1 + self.state.global_step - self._globalstep_last_logged)
        statistics.add_loss(loss)

    def _count(self, inputs: Any) -> None:
        """Count the operations and tokens of a batch."""
        for part in micro_batches_of(inputs):
            ids = {"input_ids": part.input_ids_RL} if isinstance(part, Batch) else part
            self.current_flos += cast(Any, float(self.floating_point_ops(ids)))
        self._track_num_input_tokens(inputs)

    # ---- at a step's end: decide, log, evaluate, save

    def _end_step(self, run: Run, epoch: int, norm: Any, rate: float | None) -> None:
        """Vote at the end of a step or of an epoch, and log; then transformers evaluates and saves.

        Args:
            norm: Gradient norm of the last step; None after an epoch without a step.
            rate: Learning rate of the last step, likewise.
        """
        ours, control, preemption = self.trl_tpu, self.control, self.trl_tpu.preemption
        must_save = preemption.decide(ours.agreement, self.state, control)
        acts = control.should_log or control.should_evaluate or control.should_save
        if acts:
            ours.runtime.step_boundary()  # keep logs, evaluations and saves out of the step's program
        if control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._log_step(norm, run.start_time, self._get_learning_rate() if rate is None else rate)
        with ours.paused():
            preemption.interrupts_evaluations = True  # evaluations outside of steps run to their end
            try:
                more = run.trial, epoch, run.ignore_keys, run.start_time, rate
                self._maybe_log_save_evaluate(ours.statistics.loss_sum_1, norm, self.model_wrapped, *more)
            except EvaluationInterrupted:
                preemption.stop(SIGTERM, self.state, self.control)
                must_save = True
            finally:
                preemption.interrupts_evaluations = False
            # transformers did not save: a SIGTERM ended the evaluation, or save_strategy="best" cleared the request
            if must_save and preemption.saved_step != self.state.global_step:
                self._save_checkpoint(self.model_wrapped, run.trial)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        if acts:  # callbacks may have requested a stop
            ours.agreement.decide(self.args, self.state, self.control, {})

    def _log_step(self, norm: torch.Tensor | float | None, start_time: float, rate: float) -> None:
        """Log the step statistics since the last log.

        Raises:
            FloatingPointError: Too many steps in a row were not finite.
        """
        ours, step = self.trl_tpu, self.state.global_step
        logs, loss_sum, counted = ours.statistics.close(norm, step, step - self._globalstep_last_logged)
        ours.recompiles.settle()
        self._total_loss_scalar += loss_sum
        self._globalstep_last_logged = step
        self.store_flos()
        if ours.gradient_norms is not None:
            names, norms_N = ours.gradient_norms
            logs |= zip(names, ours.runtime.fetch([norms_N])[0].tolist(), strict=True)
        self.log(logs | {"learning_rate": rate}, start_time)
        self._stop_if_nonfinite(counted)

    def _stop_if_nonfinite(self, counted: StepCounts) -> None:
        """Raise FloatingPointError after too many consecutive nonfinite steps; name the first and its dataset rows."""
        ours, limit = self.trl_tpu, self.trl_tpu.statistics.limit
        if not (limit and counted.reached_at):  # the resumed run may have had a limit
            return
        last = self.state.global_step - counted.taken + counted.reached_at
        first = last - limit + 1
        loader = self.callback_handler.train_dataloader
        rows = loaders.rows_of_step(loader, first, self.args.gradient_accumulation_steps)
        named = "unknown" if rows is None else f"{rows[:16]} of the trainer's train_dataset"
        if self.args.save_strategy != "no":
            self._save_checkpoint(self.model, None)
            ours.checkpointer.wait()
        latest = ours.checkpointer.latest
        weights = "not saved" if latest in ("", *ours.checkpointer.failed) else f"in {latest}"
        raise FloatingPointError(
            f"The loss or the gradient of {limit} steps in a row, {first} to {last}, was NaN or infinite "
            f"(nonfinite_limit={limit}). Their updates were skipped: the weights are unchanged since step {first - 1} "
            f"({weights}). The rows of step {first} are {named}. Check them and the model's weights, lower "
            "learning_rate, load float16 weights in another dtype, or turn these checks off by nonfinite_limit=0."
        )

    # ---- after the last step

    def _finish(self, trial: Any, samples: float, start_time: float) -> Any:
        """End a run with transformers' `_finalize_training`, when all saves are written."""
        ours, stopped_by = self.trl_tpu, self.trl_tpu.preemption.stopped_by
        ours.step_state.unstack()  # before the best model is loaded and callbacks look at the model
        open_loss, counted = ours.statistics.close_steps()
        self._total_loss_scalar += open_loss
        self._stop_if_nonfinite(counted)
        if ours.statistics.nonfinite:  # `train_loss` is the mean over the other steps
            steps = self.state.global_step - self._initial_global_step
            total, finite = self._total_loss_scalar, steps - ours.statistics.nonfinite
            self._total_loss_scalar = total * steps / finite if finite > 0 else float("nan")
        # wait on all ranks: a save may still delete older checkpoints, and launchers kill all ranks when one exits
        ours.checkpointer.settle()
        if stopped_by is not None:
            step, max_steps = self.state.global_step, self.state.max_steps
            logger.warning("At step %s of %s: %s.", step, max_steps, ours.unfinished(stopped_by))
        # with a limit of 1 transformers would delete all `checkpoint-*` folders but the best, including the checkpoint
        # to resume from after a stop
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            result = self._finalize_training(trial, samples, start_time)
        finally:
            self.args.save_total_limit = limit
        best = None if ours.best_model_lost else self.state.best_model_checkpoint
        if stopped_by is None and best is not None and limit == 1 and self.args.should_save:
            ours.run_folder.rotate(1, {Path(best).name})
        self._report_pushes()
        return result


def precision_of(args: Any, model: nn.Module) -> str:
    """Describe the data types of products and of weights."""
    products = "bfloat16 over " if args.bf16 else "float16 over " if args.fp16 else ""
    return products + str(next(model.parameters()).dtype).removeprefix("torch.") + " weights" * bool(products)
