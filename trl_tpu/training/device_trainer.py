"""transformers' training loop with its edges replaced: the one place that overrides `transformers.Trainer`'s methods.

The loop is transformers'. Where its edges would stop an XLA device, compile a step anew, store state whole on every
device, or let one host act alone, they call a component here:

==================================  ==========================================================================
override                            what for
==================================  ==========================================================================
train                               resume from a whole checkpoint only; hear SIGTERM; hosts that run alike
_build_accelerator_args             keep precision and batch dispatch out of accelerate
_move_model_to_device               place each parameter in its shards
compute_loss_context_manager        compute in bfloat16 over float32 weights
_get_dataloader                     batches of planned shapes, split over the mesh
init_hf_repo                        one line where the Hub refuses
_run_epoch                          skip a resumed epoch's batches; take no step after the last
create_scheduler                    the optimizer's state before step 1; layers as a loop
training_step                       a batch in one or several micro-batches
floating_point_ops                  the same, counted
_clip_grad_norm, _get_grad_norm     end the micro-batch; judge whether the step is finite
_maybe_log_save_evaluate            all hosts decide alike; one stop of the device per log
prediction_step, evaluation_loop    rewards stay on the device until the end
save_model                          weights from their shards
_save_checkpoint                    hand a checkpoint's contents to the `Checkpointer`
_load_from_checkpoint               weights back into their shards
_load_best_model                    the same
_load_optimizer_and_scheduler       the optimizer's state back into its shards
_load_rng_state                     go on without a device's random numbers, where TRL wrote the checkpoint
_finalize_training                  wait for saves; leave nonfinite steps out of the mean loss
==================================  ==========================================================================
"""

import contextlib
import logging
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import EvalLoopOutput, HubStrategy, has_length

from ..batching.mesh_loader import mesh_loader
from ..checkpoint.aside import fill_aside
from ..checkpoint.loader import CheckpointLoader
from ..checkpoint.manifest import files_in, is_ours
from ..checkpoint.remote import RemoteRun
from ..checkpoint.run_folder import RunFolder
from ..checkpoint.saver import Checkpointer, failure_anywhere
from ..checkpoint.state_dict import give_weights_on_host, whole_weights
from ..checkpoint.storage import older_weights
from ..config.urls import is_url, private_folder
from ..data.loader import collating_with, outlive_sigterm, skip_batches, skipping_with
from ..data.packed_batch import micro_batches_of, tensors_of
from ..errors import UserError
from ..modeling.adapters import complete_config
from ..modeling.readers import saved_scale, set_scale
from ..modeling.work import work_of_a_pair
from ..parallel.shard import keep_activations_split, place_model, plan_model, scatter_gradients
from ..parallel.shard_report import ShardReport
from ..runtime import Runtime, current
from .agreement import HostAgreement
from .callbacks import StepEdges, keeping_all, watches_saves
from .contents import contents_of, keeps_state
from .evaluation import evaluate_batch, run_evaluation
from .hub import making_repository, report_pushes
from .logs import leave_nonfinite_out, log_step
from .metrics import RewardMetrics
from .nonfinite import NonfiniteGuard, limit_of
from .optimizer import bare
from .preemption import SIGTERM, EvaluationCutShort, Preemption, Unfinished
from .progress import use_own_progress
from .recompile_guard import RecompileGuard
from .same_run import check_alike, describe_run, order_of_pairs
from .step_state import StepState
from .throughput import Throughput
from .trackers import EvaluationTables

if TYPE_CHECKING:
    from ..batching.batch_plan import BatchPlan
    from ..config.reward_config import RewardConfig
    from ..evaluation.verdict import Verdict

logger = logging.getLogger(__name__)


class DeviceTrainer(Trainer):
    """A Trainer whose every step is one program on the device, and whose checkpoints are complete or invisible.

    Args:
        runtime: Of this process.
        batch_plan: How batches are laid out.
        kwargs: Those of `transformers.Trainer`; `args` is a `RewardConfig`.
    """

    args: "RewardConfig"
    model: PreTrainedModel  # or one of peft, which hands its attributes on
    shard_report: ShardReport | None = None

    def __init__(
        self, *, runtime: Runtime | None = None, batch_plan: "BatchPlan | None" = None, **kwargs: Any
    ) -> None:
        self.runtime = runtime = runtime or current()
        self.batch_plan = batch_plan = batch_plan or self.plan_batches(**kwargs)
        super().__init__(**kwargs)
        # Trainer computes a loss in evaluation only for models that return one, or when told so
        self.can_return_loss = True
        self.label_names = []
        args = self.args
        self.remote = None if args.output_url is None else RemoteRun(args.output_url)
        if self.remote is not None and not keeps_state(self.accelerator):
            raise UserError(
                f"FSDP and DeepSpeed of accelerate write a part of a checkpoint in every process, and a URL, "
                f"{args.output_url}, is written to from one. Give a folder that all processes share as output_dir."
            )
        shares_disk = self.remote is None and not args.save_on_each_node
        self.agreement = HostAgreement(runtime, self.accelerator)
        self.preemption = Preemption(args.time_limit, args.save_interval)
        self.nonfinite = NonfiniteGuard(limit_of(self), runtime, args.device, self.accelerator)
        self.reward_metrics = RewardMetrics(runtime, args.device, skips_nonfinite=self.nonfinite.is_on)
        self.throughput = Throughput()
        self.work_of_a_pair: float | None = None
        """Operations that an average pair of the training data needs, where that is known."""
        self.recompiles = RecompileGuard(runtime, None)  # training begins with one that knows its plan
        self.checkpointer = Checkpointer(
            runtime,
            self.agreement,
            writes=args.should_save,
            shares_disk=shares_disk,
            limit=args.save_total_limit,
        )
        self.checkpoints = CheckpointLoader(runtime, self.agreement, shares_disk=shares_disk)
        self.run_folder = RunFolder(Path(str(args.output_dir)), self.remote, args.should_save)
        self.best_model_lost: str | None = None
        """Why the last `train()` ended with its last model in the place of its best; None if it did not."""
        self.at_late_sigterm: Callable[[], None] = partial(signal.raise_signal, signal.SIGTERM)
        """What is done where a SIGTERM came too late for training to stop."""
        self.order: dict[str, Any] = {}
        """What each step of this training depends on."""
        self._accumulates = args.gradient_accumulation_steps > 1
        self._step_state = StepState(
            runtime,
            accumulates=self._accumulates or batch_plan.accumulates,
            scanned=args.remat_policy if args.scan_layers else None,
        )
        use_own_progress(self)
        self.evaluated_rewards: tuple[str, torch.Tensor] | None = None
        """The prefix of the last evaluation's metrics, and its rewards [N, 2] on the host."""
        self.verdicts: dict[str, Verdict] = {}
        """The verdict of the last evaluation, by the prefix of its metrics."""
        self.add_callback(StepEdges(self))
        self.add_callback(EvaluationTables(self))  # behind the trackers' own

    # ---- a run

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as transformers does; resume only from a checkpoint whose files are whole. See `stopped_by`.

        Raises:
            Unfinished: After a SIGTERM.
            UserError: No checkpoint is whole, or the one given by name is not; the hosts were started with different
                arguments, data or checkpoints.
        """
        preemption = self.preemption
        preemption.start()
        self.best_model_lost = None
        self.work_of_a_pair = work_of_a_pair(self.model, self.train_dataset)  # before layers are a loop
        self.reward_metrics.forget_scale()
        set_scale(self.model.config, None)
        self.run_folder = run = RunFolder(Path(self._get_output_dir(trial)), self.remote, self.args.should_save)
        with preemption.hearing_sigterm(listens=not self.args.enable_jit_checkpoint):
            try:
                checkpoint = self._checkpoint_of(run, resume_from_checkpoint)
                output = super().train(checkpoint, trial, ignore_keys_for_eval)
                if self.stopped_by is None and self.args.should_save:
                    run.end()
            finally:
                self._step_state.unstack()
                self.checkpoints.drop_download()
                self.checkpointer.wait()  # while the folder is ours
                run.release()
        if self.state.global_step == 0 and self.stopped_by is None and self.state.max_steps > 0:
            raise UserError("Training took no step: the train dataset gave no pair that can be trained on.")
        if self.stopped_by == SIGTERM or (self.stopped_by is not None and preemption.told_to_stop):
            raise self.unfinished(SIGTERM)
        if preemption.told_to_stop:  # after the last step, where we do not save: it does what it does without us
            self.at_late_sigterm()
        return output

    def _check_there_is_a_batch(self) -> None:
        batch = self.args.train_batch_size * self.accelerator.num_processes
        if self.args.dataloader_drop_last and has_length(self.train_dataset) and len(self.train_dataset) < batch:
            raise UserError(
                f"There would be no step: dataloader_drop_last leaves out a batch that is not full, and the "
                f"{len(self.train_dataset)} pairs of the train dataset do not fill one of {batch}. Leave it out, or "
                "make batches smaller."
            )

    def _together(self, action: Callable[[], None]) -> None:
        """Do something in every process, and raise in all what any one raised."""
        if (failure := failure_anywhere(action, self.agreement.all_gather_object)) is not None:
            raise failure

    def _checkpoint_of(self, run: RunFolder, resume: str | bool | None) -> str | None:
        """Find the checkpoint to go on from, and make the folder its run's; a new run's, where there is none."""
        self._check_there_is_a_batch()
        self.order = order_of_pairs(self.args, self.accelerator.num_processes, self.train_dataset)
        if self.runtime.shares_mesh and self.agreement.count > 1:
            own = self.order | describe_run(self.args, self.eval_dataset, resume)
            check_alike(self.agreement.all_gather_object(own))
        self._together(run.claim)
        checkpoint = self.checkpoints.find(resume, run, self.batch_plan.layout, self.order)
        step = self.checkpoints.state().global_step
        self._together(lambda: run.begin(self.checkpoints.place, step))
        return checkpoint

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        with making_repository(self.args):
            super().init_hf_repo(token, private)

    @property
    def stopped_by(self) -> str | None:
        """What ended the last `train()` before its end: "training_time_limit" or "SIGTERM"."""
        return self.preemption.stopped_by

    @property
    def stop_checkpoint(self) -> str:
        """The folder, or URL, of the last save, which after a stop is that of its step."""
        return self.checkpointer.latest

    def unfinished(self, reason: str) -> Unfinished:
        """Return what to raise after a stop."""
        return Unfinished(reason, self.stop_checkpoint, self.stop_checkpoint not in self.checkpointer.failed)

    # ---- placement and precision

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**kwargs)
        if built["mixed_precision"] == "bf16":
            built["mixed_precision"] = "no"  # on a TPU it would store every float32 tensor as bfloat16
        if built["dataloader_config"].dispatch_batches is None:
            # for a stream accelerate would make batches on one process and cut them up for the others
            built["dataloader_config"].dispatch_batches = False
        return built

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        stack = super().compute_loss_context_manager()
        if self.args.bf16:
            stack.enter_context(torch.autocast(self.args.device.type, dtype=torch.bfloat16))
        return stack

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        plan = plan_model(model, self.args.mesh_shape, self.args.sharding_rules)
        plan.check(name for name, _ in model.named_parameters())
        if not self.runtime.compiles:
            super()._move_model_to_device(model, device)
        self.shard_report = place_model(model, plan, self.runtime, device)
        if self.runtime.compiles:
            keep_activations_split(model, plan, self.shard_report.placements, self.runtime)
            scatter_gradients(model, plan, self.shard_report.placements, self.runtime)
            if self.runtime.topology().process_count == 1:  # else all would have to ask for them together
                give_weights_on_host(model, self.runtime)

    # ---- batches

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        collate = self.batch_plan.collator(dataset, batch_size, self.data_collator)
        if not self.runtime.compiles:
            with collating_with(self, collate):
                loader = super()._get_dataloader(
                    dataset, description, batch_size, sampler_fn, is_training, dataloader_key=dataloader_key
                )
            inner = getattr(loader, "base_dataloader", loader)  # accelerate's holds torch's
            inner.worker_init_fn = partial(outlive_sigterm, inner.worker_init_fn)
            return loader
        sampler = None
        if isinstance(dataset, torch.utils.data.IterableDataset):
            collate = self._get_collator_with_removed_columns(collate, description=description)
        else:
            dataset = self._remove_unused_columns(dataset, description=description)
            sampler = None if sampler_fn is None else sampler_fn(dataset)
        return mesh_loader(dataset, collate, batch_size, sampler, self.args, self.args.mesh_shape, self.runtime)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        def skip(loader: Any, count: int) -> Any:
            return self.runtime.loader(skip_batches(loader.batches, count), self.args.mesh_shape.batch_axes)

        # a run that is resumed at its end would take one more step, as the loop looks for the end after each
        self.control.should_training_stop |= self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            with skipping_with(skip) if self.runtime.compiles else contextlib.nullcontext():
                super()._run_epoch(*args, **kwargs)

    # ---- the step

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule. The optimizer is final now, and nothing is loaded into it yet: create its state, once."""
        self.runtime.recompute_layers(self.model, self.args.remat_policy)
        if self.runtime.compiles:
            assert self.shard_report is not None  # whatever compiles was placed
            optimizer_of_torch = bare(self.optimizer)
            if self._step_state.prepare(self.model, self.shard_report.placements, optimizer_of_torch):
                self.nonfinite.skip_on_device(optimizer_of_torch)
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run one batch, in one or several micro-batches, whose gradients add up and whose losses do."""
        *accumulated, last = micro_batches_of(inputs)
        self._end_micro_batch()
        for rows in accumulated:
            self._tr_loss += self._micro_batch(model, rows, num_items_in_batch, updates=self._accumulates)
            self.runtime.step_boundary()
        return self._micro_batch(model, last, num_items_in_batch)

    def _micro_batch(
        self, model: nn.Module, rows: dict[str, Any], num_items_in_batch: Any, updates: bool = True
    ) -> torch.Tensor:
        self.recompiles.see(tensors_of(rows), updates)
        self._step_state.attach_gradients()
        loss = super().training_step(model, rows, num_items_in_batch)
        if self.nonfinite.is_on:
            self.nonfinite.see(loss)
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        if "packed" not in inputs:
            return super().floating_point_ops(inputs)
        ids = [rows.input_ids_RL for rows in inputs["packed"].micro_batches]
        return sum(super(DeviceTrainer, self).floating_point_ops({"input_ids": ids_RL}) for ids_RL in ids)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self._end_micro_batch()
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            self._end_micro_batch()
        norm = super()._get_grad_norm(model, grad_norm)
        if self.nonfinite.is_on:
            self._tr_loss = self.nonfinite.end_step(norm, self._tr_loss, self.optimizer)
        return norm

    def _end_micro_batch(self) -> None:
        """Execute each micro-batch on its own, or all of a step would unroll into one long program.

        Called before the next micro-batch and before the update, not after the micro-batch: the loop adds up its loss
        after `training_step`, and that belongs to the same program.
        """
        if self._accumulates:
            self.runtime.step_boundary()

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
        control, preemption = self.control, self.preemption
        must_save = preemption.decide(self.agreement, self.args, self.state, control)
        acts = control.should_log or control.should_evaluate or control.should_save
        if acts:
            self.runtime.step_boundary()  # what the step has recorded is its own program
        self.recompiles.pause()
        if control.should_log and self.state.global_step > self._globalstep_last_logged:
            log_step(self, tr_loss, grad_norm, start_time, learning_rate)
        self.throughput.pause()
        try:
            with preemption.cutting_evaluations_short():
                super()._maybe_log_save_evaluate(
                    tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate
                )
        except EvaluationCutShort:
            preemption.stop(SIGTERM, self.args, self.state, self.control)
            must_save = True
        if must_save and not preemption.has_saved(self.state.global_step):
            # the evaluation before it was cut short; or save_strategy="best" has taken the wish away
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        self.recompiles.resume()
        self.throughput.resume()
        if acts:  # whereupon callbacks may have asked to stop
            self.agreement.decide(self.args, self.state, self.control, {}, now=True)

    # ---- evaluation

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the loss, the rewards [P, 2] and labels [P] of one batch, on the device; zeros, as TRL's old ones."""
        loss, rewards_P2 = evaluate_batch(self, model, self._prepare_inputs(inputs))
        if prediction_loss_only or rewards_P2 is None:
            return loss, None, None
        return loss, rewards_P2, torch.zeros(len(rewards_P2), dtype=torch.long, device=rewards_P2.device)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        self.callback_handler.eval_dataloader = dataloader
        return run_evaluation(self, dataloader, ignore_keys, metric_key_prefix)

    def plan_batches(
        self, *, args: "RewardConfig", model: Any, processing_class: Any, train_dataset: Any, **kwargs: Any
    ) -> "BatchPlan":
        """Plan the batches of a subclass that gave none, from what it gave `transformers.Trainer`."""
        raise NotImplementedError

    def rewards_of(self, outputs: Any, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Return the rewards [P, 2] in what `compute_loss` returned beside the loss; None where there are none."""
        raise NotImplementedError

    def evaluated_pairs(self, count: int) -> Any:
        """Return the dataset whose first ``count`` pairs an evaluation was on, in order; None if that is not known."""
        return None

    def predictions_of(self, rewards_P2: torch.Tensor) -> torch.Tensor:
        """Return what metrics are computed from."""
        return rewards_P2

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapters, as safetensors with config and tokenizer beside it.

        A folder has all of its files afterwards or, where there is no room for them, what it had before.
        """
        folder = str(output_dir or self.args.output_dir)
        remote = self.remote if folder == str(self.args.output_dir) else None
        if is_url(folder):
            folder, remote = private_folder(folder), RemoteRun(folder)

        def write() -> None:
            weights = None
            if self.runtime.compiles:
                weights = whole_weights(self.model, self.runtime, keeps=self.args.should_save)
            if not self.args.should_save:
                if weights is None:  # accelerate's FSDP and DeepSpeed gather them
                    super(DeviceTrainer, self).save_model(folder, _internal_call=True)
                return
            with fill_aside(Path(folder)) as staging:
                if weights is not None:
                    self._save(str(staging), weights)
                else:
                    super(DeviceTrainer, self).save_model(str(staging), _internal_call=True)
                complete_config(self.model, staging)
                names = files_in(staging)
                if remote is not None:
                    remote.put(staging, names)
                    remote.delete_files(older_weights(remote.names(), names))
                for name in older_weights([path.name for path in Path(folder).iterdir()], names):
                    Path(folder, name).unlink()

        # the other hosts wait here, since they may read it next
        if (failure := failure_anywhere(write, self.runtime.all_gather_object)) is not None:
            raise failure
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_card(self, **names: Any) -> None:
        try:
            self.create_model_card(**names)
        except OSError as error:  # the model is saved, or its save says more
            logger.error("The model card could not be written: %s", error)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint beside training: see `trl_tpu.checkpoint.saver`."""
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self._write_card()
        self.checkpointer.wait()  # the best one so far may be on its way
        contents = contents_of(self, self.run_folder)
        self.checkpointer.save(contents)
        self.preemption.note_save(self.state.global_step)
        final = contents.run.path / contents.name
        if self.args.push_to_hub or any(map(watches_saves, self.callback_handler.callbacks)):
            self.checkpointer.wait()  # they look for the folder
        if self.args.push_to_hub and any(final.glob("*.safetensors")):
            report_pushes(self)
            self._push_from_checkpoint(str(final))
        elif self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END:
            logger.warning("%s is not pushed: it has no model's files here. The model is, at the end.", contents.place)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.checkpoints.load_weights(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def find_best_again(self) -> None:
        """Say where a resumed run's best checkpoint is now: transformers looks only where it was saved."""
        if (best := self.checkpoints.best_so_far(self.run_folder)) is not None:
            self.state.best_model_checkpoint = best

    def _load_best_model(self) -> None:
        if self.stopped_by == SIGTERM:
            return
        best = str(self.state.best_model_checkpoint)
        if not keeps_state(self.accelerator) or (self.remote is None and Path(best).is_dir() and not is_ours(best)):
            super()._load_best_model()
            return
        folder, faults = self.checkpoints.find_best(best, self.run_folder)
        if faults:
            self.best_model_lost = f"{best}: {'; '.join(faults)}"
            logger.error("The best model is LOST, and the last one is in its place: %s.", self.best_model_lost)
        elif self.checkpoints.load_weights(self.model, folder):
            self.reward_metrics.evaluated = saved_scale(folder)
            set_scale(self.model.config, self.reward_metrics.scale)
            logger.info("Loaded the best model, from %s (score: %s).", best, self.state.best_metric)
        else:  # it has no state of ours, but a model's files
            self.state.best_model_checkpoint = folder
            super()._load_best_model()
            self.state.best_model_checkpoint = best

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with self._step_state.one_by_one():
            ours = keeps_state(self.accelerator) and self.checkpoints.load_optimizer(
                self.model, bare(self.optimizer), self.lr_scheduler, checkpoint
            )
            if not ours:
                super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        try:
            super()._load_rng_state(checkpoint)
        except KeyError as error:
            if error.args != (self.args.device.type,):
                raise
            logger.warning("%s has no random numbers of this device, which start anew.", checkpoint)

    # ---- after the last step

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._step_state.unstack()  # before the best model is loaded and callbacks look at the model
        if self.nonfinite.is_on:
            leave_nonfinite_out(self)
        self.checkpointer.wait()  # one that is written may delete older ones by the limit
        if self.accelerator.num_processes > 1:
            self.accelerator.wait_for_everyone()  # launchers end all processes when one has ended
        if self.stopped_by is not None:
            done, of = self.state.global_step, self.state.max_steps
            logger.warning("At step %s of %s: %s.", done, of, self.unfinished(self.stopped_by))
        with keeping_all(self.args):
            result = super()._finalize_training(*args, **kwargs)
        if self.stopped_by is None and self.state.best_model_checkpoint is not None and not self.best_model_lost:
            self.checkpointer.keep_best_alone(self.run_folder, Path(self.state.best_model_checkpoint).name)
        report_pushes(self)
        if self.checkpointer.failed:
            logger.error("These checkpoints were NOT saved: %s", ", ".join(self.checkpointer.failed))
        return result
