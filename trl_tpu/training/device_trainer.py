"""transformers' training loop with its edges replaced, for any model and loss.

Overrides that save and load are in `trl_tpu.training.saving`, those about rewards (`compute_loss`, `prediction_step`,
`evaluation_loop`, `call_model_init`, `log`, `create_model_card`) in `trl_tpu.trainer`; all others are here.

The loop is transformers'. Where its edges would stop an XLA device, compile a step anew, store state whole on every
device, or let one host act alone, they call a component here:

==================================  ==========================================================================
override                            what for
==================================  ==========================================================================
train                               resume from a whole checkpoint only; hear SIGTERM; hosts that run alike
_build_accelerator_args             keep precision and batch dispatch out of accelerate
_move_model_to_device               place each parameter in its shards
compute_loss_context_manager        compute in bfloat16 over float32 weights
_get_dataloader                     batches of planned shapes, split over the mesh; by prompts
_run_epoch                          skip a resumed epoch's batches; take no step after the last
create_optimizer                    over the shards of a model that processes share
create_scheduler                    the optimizer's state before step 1; layers as a loop
training_step                       a batch in one or several micro-batches
floating_point_ops                  operations of packed rows; end the micro-batch's program
_get_grad_norm                      judge whether the step is finite
_maybe_log_save_evaluate            all hosts decide alike; one stop of the device per log
_finalize_training                  layers apart again; leave nonfinite steps out of the mean loss
==================================  ==========================================================================
"""

import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, ProgressCallback, get_scheduler
from transformers.trainer_utils import has_length

from ..checkpoint.folders import RunFolder
from ..checkpoint.state_dict import gather_weights_on_save
from ..config.checks import check_final_rate
from ..data.loader import (
    WholeStream,
    by_prompt,
    collate_marked,
    host_batches,
    outlive_sigterm,
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
from .optimizer import bare, skip_unless, store_first_moments
from .progress import JsonLines, Progress
from .saving import Components, SavingTrainer
from .statistics import StepCounts, StepStatistics
from .stopping import SIGTERM, EvaluationCutShort, StepCallback

logger = logging.getLogger(__name__)


class DeviceTrainer(SavingTrainer):
    """A Trainer whose every step is one program on the device, and whose checkpoints are complete or invisible.

    It knows batches by their shapes and what its steps measure by its sums: not what they are of.

    What this package adds is in `trl_tpu` and in private methods: a subclass may use any other public name.
    """

    shard_report: shard.ShardReport | None = None
    stopped_by: str | None = None
    """What ended the last `train()` before its end: "training_time_limit" or "SIGTERM"; else None."""
    stop_checkpoint = ""
    """The folder, or URL, of the last save, which after a stop is that of its step."""

    def _make_parts(self, plan: BatchPlan, statistics: StepStatistics) -> None:
        """Make the parts, once transformers' constructor has run."""
        shows_bar, is_json = self.pop_callback(ProgressCallback) is not None, self.args.progress == "json"
        if is_json:
            self.pop_callback(PrinterCallback)
        progress = JsonLines() if is_json else Progress() if shows_bar else None
        announce = logger.info if progress is None else progress.say
        self.trl_tpu = ours = Components(self.args, self.model, self.accelerator, plan, statistics, announce)
        for callback in (progress, StepCallback(self._begin, ours.agreement, ours.preemption, ours.recompiles.check)):
            if callback is not None:
                self.add_callback(callback)
        self.batch_plan, self.checkpointer = plan, ours.checkpointer
        # by TRL's name
        offloads = self.args.activation_offloading
        self.maybe_activation_offload_context = (
            current().activations_on_host() if offloads else contextlib.nullcontext()
        )

    @property
    def _accumulates(self) -> bool:
        return self.args.gradient_accumulation_steps > 1

    def describe(self) -> str:
        """Return what trains where, for the start of a log: runtime, mesh, what is sharded, batches and shapes."""
        of_all = sum(parameter.numel() for parameter in self.model.parameters())
        precision = "bfloat16 over float32 weights" if self.args.bf16 else "the weights' own precision"
        return (
            f"Training on {current().topology().description}: {choice().reason}\n"
            f"Computing in {precision}; {self.get_num_trainable_parameters():,} of {of_all:,} parameters train\n"
            f"{self.shard_report}\n"
            f"Batches of {self._train_batch_size} pairs, {self.trl_tpu.batch_plan.describe()}"
        )

    # ---- a run

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as transformers does; resume only from a checkpoint whose files are whole. See `stopped_by`.

        Args:
            resume_from_checkpoint: A checkpoint's folder or URL; True for the newest good one of `output_dir`; "auto"
                for the newest one if there is one, else start fresh. None for "auto" if `args` says so.
            trial: Of a hyperparameter search.
            ignore_keys_for_eval: As in transformers.

        Raises:
            Unfinished: After a SIGTERM.
            UserError: No checkpoint is whole, or the one given by name is not; the newest one, with "auto", is damaged
                or belongs to another run; the hosts were started with different
                arguments, data or checkpoints.
        """
        ours, preemption = self.trl_tpu, self.trl_tpu.preemption
        if resume_from_checkpoint is None and self.args.resume_from_checkpoint == "auto":
            resume_from_checkpoint = "auto"  # of other values transformers' `train` reads none, either
        with preemption.hearing_sigterm(listens=not self.args.enable_jit_checkpoint):
            ours.best_model_lost = None
            ours.run_folder = run = RunFolder(Path(self._get_output_dir(trial)), ours.remote, self.args.should_save)
            try:
                checkpoint = self._checkpoint_of(run, resume_from_checkpoint)
                output = super().train(checkpoint, trial, ignore_keys_for_eval)
            finally:
                ours.step_state.unstack()
                ours.checkpoints.drop_download()
                ours.checkpointer.wait()  # while the folder is ours
                run.release()
                self.stopped_by, self.stop_checkpoint = preemption.stopped_by, ours.checkpointer.latest
        if self.state.global_step == 0 and preemption.stopped_by is None:
            raise UserError(
                f"Training took no step of {self.state.max_steps}: it needs max_steps or num_train_epochs above 0, "
                "and pairs that can be trained on."
            )
        # a process that is told to end after a time limit does not end alone
        if preemption.stopped_by is not None and any(ours.agreement.all_gather_object(preemption.told_to_stop)):
            raise ours.unfinished(SIGTERM)
        if preemption.told_to_stop:  # after the last step, where we do not save: it does what it does without us
            ours.at_late_sigterm()
        return output

    # ---- placement and precision

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**kwargs)
        if built["mixed_precision"] == "bf16":
            built["mixed_precision"] = "no"  # on a TPU it would store every float32 tensor as bfloat16
        if self.args.parallelism_config is None:  # accelerate, which would refuse `tensor` on a CPU, has nothing to do
            built.pop("parallelism_config", None)
        # each process makes its batches, which accelerate cannot cut up by pairs, and all as many
        built["dataloader_config"].dispatch_batches, built["dataloader_config"].even_batches = False, True
        return built

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        stack = super().compute_loss_context_manager()
        if self.args.bf16:
            stack.enter_context(torch.autocast(self.args.device.type, dtype=torch.bfloat16))
        stack.enter_context(self.maybe_activation_offload_context)
        return stack

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        own, args = shard.mesh_of(model), self.args
        if own is not None:  # which a user may have loaded the model on
            if own.sizes != args.mesh_shape.sizes and (args.mesh or (own.tensor > 1 and args.total_batch_size)):
                raise UserError(
                    f"The model was loaded on the mesh '{own}', and the config is for '{args.mesh_shape}': set "
                    f"mesh='{own}' there."
                )
            args.mesh_shape = own
        if self.args.shards_over_processes:
            self.shard_report = shard.shard_model(model, self.args.mesh_shape, current(), device)
            return
        plan = shard.plan_model(model, self.args.mesh_shape, self.args.sharding_rules)
        runtime = current()  # transformers' constructor calls this, when nothing of ours is made
        if not (is_spmd := runtime.is_spmd):
            super()._move_model_to_device(model, device)
        self.shard_report = shard.place_model(model, plan, runtime, device)
        if is_spmd:
            shard.keep_activations_split(model, plan, self.shard_report.placements, runtime)
            if runtime.topology().process_count == 1:  # else all would have to ask for them together
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
            sampler_fn = partial(by_prompt, sampler_fn, self.args, parts)
        if not self._shards_model:
            if is_stream and parts > 1:
                if not is_training:
                    collate = partial(
                        collate_marked, collate, self._get_collator_with_removed_columns(list, description)
                    )
                dataset = WholeStream(dataset, None if is_training else batch_size * parts)
            own, self.data_collator = self.data_collator, collate  # transformers' method takes no other
            try:
                loader: Any = super()._get_dataloader(
                    dataset, description, batch_size, sampler_fn, is_training, dataloader_key=dataloader_key
                )
            finally:
                self.data_collator = own
            if is_grouped:
                batches = loader.batch_sampler  # of all processes, or this one's of those
                loader.set_sampler(getattr(batches, "batch_sampler", batches).sampler)  # and be told a resumed epoch
            inner = getattr(loader, "base_dataloader", loader)  # accelerate's holds torch's
            inner.worker_init_fn = partial(outlive_sigterm, inner.worker_init_fn)
            return loader
        batch_size *= parts
        sampler = None
        if is_stream:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        else:
            dataset = self._remove_unused_columns(dataset, description=description)
            sampler = None if sampler_fn is None else sampler_fn(dataset)
        batches = host_batches(dataset, collate, batch_size, sampler, self.args)
        return runtime.loader(batches, BATCH_AXES)

    def _run_epoch(self, model: Any, epoch: int, train_dataloader: Any, *args: Any, **kwargs: Any) -> None:
        def skip(loader: Any, count: int) -> Any:
            # a script's own loader is torch's, or accelerate's around it
            batches = skip_batches(getattr(loader, "dataloader", loader), count)
            return self.trl_tpu.runtime.loader(batches, BATCH_AXES)

        # a run that is resumed at its end would take one more step, as the loop looks for the end after each
        self.control.should_training_stop |= self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            shards = self._shards_model
            with skipping_by(skip, train_dataloader) if shards else contextlib.nullcontext():
                super()._run_epoch(model, epoch, train_dataloader, *args, **kwargs)

    # ---- the step

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer over shards, where processes have them: an evaluation may have gathered some weights.

        transformers 5.24 does so by itself.
        """
        shard.reshard(self.model)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule. The optimizer is final now, and nothing is loaded into it yet: create its state, once."""
        ours = self.trl_tpu
        ours.runtime.recompute_layers(self.model, self.args.remat_policy)
        recompute_in_same_batch(self.model)
        if ours.runtime.is_spmd:
            assert self.shard_report is not None  # whatever compiles was placed
            optimizer_of_torch = bare(self.optimizer)
            accumulates = self._accumulates or ours.batch_plan.accumulates
            is_new = ours.step_state.prepare(self.model, self.shard_report.placements, optimizer_of_torch, accumulates)
            if is_new and ours.statistics.skips_nonfinite:
                skip_unless(lambda: ours.statistics.is_finite_1, optimizer_of_torch, ours.runtime)
        store_first_moments(bare(self.optimizer), self.args.optim_state_dtype)
        ours.runtime.fuse(bare(self.optimizer))
        if self.lr_scheduler is None and self.args.learning_rate_end is not None:
            (name, arguments), warmup = self.args.schedule, self.args.get_warmup_steps(num_training_steps)
            scheduled: Any = optimizer or self.optimizer
            check_final_rate(self.args, scheduled)
            self.lr_scheduler = get_scheduler(name, scheduled, warmup, num_training_steps, arguments)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run one batch, in one or several micro-batches, whose gradients add up and whose losses do."""
        *accumulated, last = micro_batches_of(inputs)
        for part in accumulated:
            self._tr_loss += self._micro_batch(model, part, num_items_in_batch, updates=self._accumulates)
            self.trl_tpu.runtime.step_boundary()
        return self._micro_batch(model, last, num_items_in_batch)

    def _micro_batch(self, model: nn.Module, part: Any, num_items_in_batch: Any, updates: bool = True) -> torch.Tensor:
        ours = self.trl_tpu
        ours.recompiles.see(tensors_in(part), updates)
        ours.step_state.attach_gradients()
        loss = super().training_step(model, part, num_items_in_batch)
        ours.gradient_norms.measure(self.model)  # before they are clipped; the last micro-batch has all of a step
        ours.statistics.see_loss(loss)
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count the operations of a batch.

        The loop asks for them when it has added the batch's loss up, which is the moment to execute a micro-batch on
        its own: all of a step would unroll into one long program.
        """
        if self._accumulates:
            self.trl_tpu.runtime.step_boundary()
        if not isinstance(inputs, Batch):
            return super().floating_point_ops(inputs)
        ids = ({"input_ids": part.input_ids_RL} for part in inputs.parts)
        return sum(map(super().floating_point_ops, ids))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = shard.whole(super()._get_grad_norm(model, grad_norm))
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
            ours.runtime.step_boundary()  # what the step has recorded is its own program
        ours.recompiles.pause()
        if control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._log_step(tr_loss, grad_norm, start_time, learning_rate)
        ours.statistics.pause()
        preemption.cuts_evaluations_short = True  # others, as before the first step, go on
        try:
            super()._maybe_log_save_evaluate(
                tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate
            )
        except EvaluationCutShort:
            preemption.stop(SIGTERM, self.args, self.state, self.control)
            must_save = True
        finally:
            preemption.cuts_evaluations_short = False
        if must_save and not preemption.has_saved(self.state.global_step):
            # the evaluation before it was cut short; or save_strategy="best" has taken the wish away
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        ours.recompiles.resume()
        ours.statistics.resume()
        if acts:  # whereupon callbacks may have asked to stop
            ours.agreement.decide(self.args, self.state, self.control, {}, now=True)

    def _log_step(
        self,
        loss_sum_1: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        start_time: float | None,
        learning_rate: float | None,
    ) -> None:
        """Log what was added up since the last log.

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
        """End the run if too many steps in a row were not finite, with the first of them and its rows named."""
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
            self._leave_nonfinite_out(self.trl_tpu.statistics)
        return super()._finalize_training(*args, **kwargs)

    def _leave_nonfinite_out(self, statistics: StepStatistics) -> None:
        """Take the steps that are not finite out of the mean that `train_loss` is, also those since the last log."""
        open_loss, counted = statistics.close_steps(self._tr_loss)
        self._stop_if_nonfinite(counted)
        if statistics.nonfinite:
            steps = self.state.global_step - self._initial_global_step
            finite = steps - statistics.nonfinite
            total = self._total_loss_scalar + open_loss
            self._tr_loss = statistics.loss_sum()
            self._total_loss_scalar = total * steps / finite if finite > 0 else float("nan")
