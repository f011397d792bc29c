"""Run transformers' training loop on any runtime, for any model and loss.

This module overrides methods of `transformers.Trainer` for placement, batches and steps. Overrides that save and load
are in `trl_tpu.training.saving`. Overrides about rewards (`compute_loss`, `prediction_step`, `evaluation_loop`,
`call_model_init`, `log`, `create_model_card`) are in `trl_tpu.trainer`.

The loop itself is transformers'. An override replaces code that would stall an XLA device, recompile a step, replicate
state on every device, or let one host act alone:

==================================  ==========================================================================
override                            purpose
==================================  ==========================================================================
train                               resume only from a complete checkpoint; handle SIGTERM; compare hosts
_build_accelerator_args             turn off accelerate's mixed precision and batch dispatch
_move_model_to_device               shard the parameters
compute_loss_context_manager        compute in bfloat16 over float32 weights
_get_dataloader                     make batches of planned shapes; split them over the mesh; group prompts
_run_epoch                          skip the batches of a resumed epoch; take no step after the last
create_optimizer                    reshard the model before the optimizer reads its parameters
create_scheduler                    create optimizer state before step 1; stack the layers into a loop
training_step                       run a batch in one or several micro-batches
floating_point_ops                  count operations of packed rows; end the program of a micro-batch
_get_grad_norm                      check that the step is finite
_maybe_log_save_evaluate            vote on all hosts; read the device once per log
_finalize_training                  unstack the layers; exclude nonfinite steps from the mean loss
==================================  ==========================================================================
"""

import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, trainer
from transformers.trainer_utils import has_length

from ..checkpoint.folders import RunFolder
from ..checkpoint.state_dict import gather_weights_on_save
from ..data.loader import (
    UnsplitStream,
    collate_marked,
    host_batches,
    ignore_foreign_sigterm,
    prompt_group_sampler,
    rows_of_step,
    skip_batches,
    skipping_by,
)
from ..errors import UserError
from ..modeling.tree_states import recompute_in_same_batch
from ..packing.batch import Batch, micro_batches_of, tensors_in
from ..parallel import shard
from ..parallel.mesh import BATCH_AXES
from ..runtime import choice, current
from .batch_plan import BatchPlan
from .optimizer import create_schedule, skip_unless, store_first_moments, unwrap, update_in_float32
from .progress import JsonLines, Progress
from .saving import Components, SavingTrainer
from .statistics import StepCounts, StepStatistics
from .stopping import SIGTERM, EvaluationInterrupted, StepCallback

logger = logging.getLogger(__name__)


class DeviceTrainer(SavingTrainer):
    """Trainer that runs each step as one program on the device and saves checkpoints atomically.

    This class handles batch shapes and metric sums. It does not depend on the meaning of the data or of the rewards.

    State that this package adds is in the attribute `trl_tpu` and in private methods. A subclass may use any other
    public name.
    """

    shard_report: shard.ShardReport | None = None
    stopped_by: str | None = None
    """Reason the last `train()` stopped early: "training_time_limit" or "SIGTERM"; None if it finished."""
    stop_checkpoint = ""
    """Folder or URL of the last saved checkpoint. After an early stop it belongs to the last step."""

    def _make_components(self, plan: BatchPlan, statistics: StepStatistics) -> None:
        """Make the components. Call this after transformers' constructor."""
        is_json = self.args.progress == "json"
        shows_bar = self.pop_callback(trainer.DEFAULT_PROGRESS_CALLBACK) is not None  # notebooks have their own
        if is_json:
            self.pop_callback(PrinterCallback)
        progress = JsonLines() if is_json else Progress() if shows_bar else None
        announce = logger.info if progress is None else progress.say
        self.trl_tpu = ours = Components(self.args, self.model, self.accelerator, plan, statistics, announce)
        for callback in (progress, StepCallback(self._begin, ours.agreement, ours.preemption, ours.recompiles.check)):
            if callback is not None:
                self.add_callback(callback)
        self.batch_plan, self.checkpointer = plan, ours.checkpointer
        # TRL uses this attribute name
        offload: Any = current().activations_on_host if self.args.activation_offloading else contextlib.nullcontext
        self.maybe_activation_offload_context = offload()

    @property
    def _accumulates(self) -> bool:
        return self.args.gradient_accumulation_steps > 1

    def describe(self) -> str:
        """Describe the run for the start of a log: devices, mesh, sharding, precision, batches and shapes."""
        total = sum(parameter.numel() for parameter in self.model.parameters())
        precision = "bfloat16 over float32 weights" if self.args.bf16 else "the weights' precision"
        return (
            f"Training on {current().topology().description}: {choice().reason}\n"
            f"Computing in {precision}; {self.get_num_trainable_parameters():,} of {total:,} parameters train\n"
            f"{self.shard_report}\n"
            f"Batches of {self._train_batch_size} pairs, {self.trl_tpu.batch_plan.layout}"
        )

    # ---- a run

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
        ours, preemption = self.trl_tpu, self.trl_tpu.preemption
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
                ours.checkpoints.delete_download()
                ours.checkpointer.wait()  # before another run can lock the folder
                run.release()
                self.stopped_by, self.stop_checkpoint = preemption.stopped_by, ours.checkpointer.latest
        if self.state.global_step == 0 and preemption.stopped_by is None:
            raise UserError(
                f"Training took no step of {self.state.max_steps}. Set max_steps or num_train_epochs above 0, and "
                "provide pairs that can be trained on."
            )
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
        if self.args.parallelism_config is None:  # accelerate would reject the `tensor` axis on a CPU
            built.pop("parallelism_config", None)
        # accelerate cannot split our batches by pairs: each process makes its own, the same number on all
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
                    f"The model was loaded on the mesh '{loaded}', but the config has the mesh '{args.mesh_shape}'. "
                    f"Set mesh='{loaded}' in the config."
                )
            args.mesh_shape = loaded
        if self.args.shards_over_processes:
            self.shard_report = shard.shard_model(model, self.args.mesh_shape, current(), device)
            return
        runtime = current()  # `self.trl_tpu` does not exist yet: transformers' constructor calls this method
        if not runtime.is_spmd:
            super()._move_model_to_device(model, device)
            self.shard_report = shard.keep_whole(model, args.mesh_shape, args.sharding_rules, runtime)
            return
        plan = shard.plan_model(model, args.mesh_shape, args.sharding_rules)
        self.shard_report = shard.place_model(model, plan, runtime, device)
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
            pairs = steps * batch_size * (1 if self.accelerator.split_batches else parts)
            dataset = dataset.take(min(pairs, len(dataset)) if has_length(dataset) else pairs)
        collate = self.trl_tpu.batch_plan.collator(dataset, batch_size, self.data_collator)
        is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
        is_grouped = is_training and self.args.group_by_prompt
        if is_grouped:
            sampler_fn = partial(prompt_group_sampler, sampler_fn, self.args, parts)
        if not self._shards_model:
            if is_stream and parts > 1:
                if not is_training:
                    as_list = self._get_collator_with_removed_columns(list, description)
                    collate = partial(collate_marked, collate, as_list)
                dataset = UnsplitStream(dataset, None if is_training else batch_size * parts)
            collator, self.data_collator = self.data_collator, collate  # transformers' method reads this attribute
            try:
                loader: Any = super()._get_dataloader(
                    dataset, description, batch_size, sampler_fn, is_training, dataloader_key=dataloader_key
                )
            finally:
                self.data_collator = collator
            if is_grouped:
                batches = loader.batch_sampler  # with several processes accelerate's, around torch's
                # the loader passes the epoch to this sampler, also after a resume
                loader.set_sampler(getattr(batches, "batch_sampler", batches).sampler)
            inner = getattr(loader, "base_dataloader", loader)  # accelerate wraps torch's loader
            inner.worker_init_fn = partial(ignore_foreign_sigterm, inner.worker_init_fn)
            return loader
        sampler = None
        if is_stream:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        else:
            dataset = self._remove_unused_columns(dataset, description=description)
            sampler = None if sampler_fn is None else sampler_fn(dataset)
        batches = host_batches(dataset, collate, batch_size * parts, sampler, self.args)
        return runtime.loader(batches, BATCH_AXES)

    def _run_epoch(self, model: Any, epoch: int, train_dataloader: Any, *args: Any, **kwargs: Any) -> None:
        def skip(loader: Any, count: int) -> Any:
            # a user-defined loader may be wrapped by accelerate
            batches = skip_batches(getattr(loader, "dataloader", loader), count)
            return self.trl_tpu.runtime.loader(batches, BATCH_AXES)

        # the loop checks for the end only after a step, so a run resumed at its end would take one step too many
        self.control.should_training_stop |= self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            shards = self._shards_model
            with skipping_by(skip, train_dataloader) if shards else contextlib.nullcontext():
                super()._run_epoch(model, epoch, train_dataloader, *args, **kwargs)

    # ---- the step

    def create_optimizer(self, model: Any = None) -> Any:
        """Reshard the model, then make the optimizer: an evaluation before training may have left weights gathered.

        transformers 5.24 reshards the model, too.
        """
        shard.reshard(self.model)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the optimizer's state and the schedule.

        At this point the optimizer is final and no checkpoint has been loaded into it.
        """
        ours = self.trl_tpu
        ours.runtime.recompute_layers(self.model, self.args.remat_policy)
        recompute_in_same_batch(self.model)
        if ours.runtime.is_spmd:
            assert self.shard_report is not None  # set by `_move_model_to_device`
            torch_optimizer = unwrap(self.optimizer)
            accumulates = self._accumulates or ours.batch_plan.layout.accumulates
            is_new = ours.step_state.prepare(self.model, self.shard_report.placements, torch_optimizer, accumulates)
            if is_new and ours.statistics.skips_nonfinite:
                skip_unless(lambda: ours.statistics.is_finite_1, torch_optimizer, ours.runtime)
        update_in_float32(unwrap(self.optimizer))
        store_first_moments(unwrap(self.optimizer), self.args.optim_state_dtype)
        ours.runtime.fuse(unwrap(self.optimizer))
        if self.lr_scheduler is None:
            self.lr_scheduler = create_schedule(self.args, optimizer or self.optimizer, num_training_steps)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a batch in one or several micro-batches, and accumulate their gradients and losses."""
        *accumulated, last = micro_batches_of(inputs)
        runtime, batches = self.trl_tpu.runtime, self.current_gradient_accumulation_steps
        if self._accumulates and runtime.plans_shapes and isinstance(batches, int):
            # the loss is divided by this: a number would be part of the program, and an update with fewer batches, at
            # the end of an epoch, would compile another one
            divisor: Any = runtime.to_device(torch.tensor(float(batches)), self.args.device)
            self.current_gradient_accumulation_steps = divisor
        for part in accumulated:
            self._tr_loss += self._micro_batch(model, part, num_items_in_batch, updates=self._accumulates)
            runtime.step_boundary()
        return self._micro_batch(model, last, num_items_in_batch)

    def _micro_batch(self, model: nn.Module, part: Any, num_items_in_batch: Any, updates: bool = True) -> torch.Tensor:
        ours = self.trl_tpu
        ours.recompiles.see(tensors_in(part), updates)
        ours.step_state.attach_gradients()
        loss = super().training_step(model, part, num_items_in_batch)
        ours.gradient_norms.measure(self.model)  # unclipped; after the last micro-batch gradients are complete
        ours.statistics.add_loss(loss)
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the number of operations of a batch, and execute an accumulated micro-batch.

        transformers' loop calls this method after it has accumulated the loss of a batch. Executing the micro-batch
        here keeps the micro-batches of a step from being unrolled into one long program.
        """
        if self._accumulates:
            self.trl_tpu.runtime.step_boundary()
        if not isinstance(inputs, Batch):
            return super().floating_point_ops(inputs)
        ids = ({"input_ids": part.input_ids_RL} for part in inputs.parts)
        return sum(map(super().floating_point_ops, ids))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = shard.full_tensor(super()._get_grad_norm(model, grad_norm))
        self._tr_loss = self.trl_tpu.statistics.end_step(norm, self._tr_loss, self.optimizer)
        return norm

    # ---- at a step's end: decide, log, evaluate, save

    def _maybe_log_save_evaluate(
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
        ours, control, preemption = self.trl_tpu, self.control, self.trl_tpu.preemption
        must_save = preemption.decide(ours.agreement, self.args, self.state, control)
        acts = control.should_log or control.should_evaluate or control.should_save
        if acts:
            ours.runtime.step_boundary()  # keep logs, evaluations and saves out of the step's program
        ours.recompiles.pause()
        if control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._log_step(tr_loss, grad_norm, start_time, learning_rate)
        ours.statistics.pause()
        preemption.interrupts_evaluations = True  # evaluations outside of steps run to their end
        try:
            super()._maybe_log_save_evaluate(
                tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate
            )
        except EvaluationInterrupted:
            preemption.stop(SIGTERM, self.args, self.state, self.control)
            must_save = True
        finally:
            preemption.interrupts_evaluations = False
        if must_save and not preemption.has_saved(self.state.global_step):
            # transformers did not save: a SIGTERM ended the evaluation, or save_strategy="best" cleared the request
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        ours.recompiles.resume()
        ours.statistics.resume()
        if acts:  # callbacks may have requested a stop
            ours.agreement.decide(self.args, self.state, self.control, {}, now=True)

    def _log_step(
        self,
        loss_sum_1: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        start_time: float | None,
        learning_rate: float | None,
    ) -> None:
        """Log the step statistics since the last log.

        Raises:
            FloatingPointError: Too many steps in a row were not finite.
        """
        ours, step = self.trl_tpu, self.state.global_step
        rate = self._get_learning_rate() if learning_rate is None else learning_rate
        steps = step - self._globalstep_last_logged
        logs, loss_sum, counted = ours.statistics.close(loss_sum_1, grad_norm, rate, step, steps)
        ours.recompiles.settle()
        self._tr_loss = ours.statistics.loss_sum()
        self._total_loss_scalar += loss_sum
        self._globalstep_last_logged = step
        self.store_flos()
        self.log(logs | ours.gradient_norms.read(), start_time)
        self._stop_if_nonfinite(counted)

    def _stop_if_nonfinite(self, counted: StepCounts) -> None:
        """Raise FloatingPointError after too many consecutive nonfinite steps; name the first and its dataset rows."""
        if not counted.reached_at:
            return
        ours = self.trl_tpu
        last = self.state.global_step - counted.taken + counted.reached_at
        first = last - ours.statistics.limit + 1
        loader = self.callback_handler.train_dataloader
        rows = rows_of_step(loader, first, self.args.gradient_accumulation_steps)
        weights = "not saved, as save_strategy='no'"
        if self.args.save_strategy != "no":
            self._save_checkpoint(self.model, None)
            ours.checkpointer.wait()
            saved = ours.checkpointer.latest not in ours.checkpointer.failed
            weights = f"in checkpoint-{self.state.global_step}" if saved else "not saved, as the log says"
        raise FloatingPointError(ours.statistics.explain_stop(first, last, rows, weights))

    # ---- after the last step

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.trl_tpu.step_state.unstack()  # before the best model is loaded and callbacks look at the model
        if self.trl_tpu.statistics.skips_nonfinite:
            self._exclude_nonfinite_steps(self.trl_tpu.statistics)
        return super()._finalize_training(*args, **kwargs)

    def _exclude_nonfinite_steps(self, statistics: StepStatistics) -> None:
        """Exclude nonfinite steps from the mean `train_loss`, including steps since the last log."""
        open_loss, counted = statistics.close_steps(self._tr_loss)
        self._stop_if_nonfinite(counted)
        if statistics.nonfinite:
            steps = self.state.global_step - self._initial_global_step
            finite = steps - statistics.nonfinite
            total = self._total_loss_scalar + open_loss
            self._tr_loss = statistics.loss_sum()
            self._total_loss_scalar = total * steps / finite if finite > 0 else float("nan")
