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
_finalize_training                  wait for saves; leave nonfinite steps out of the mean loss
==================================  ==========================================================================
"""

import contextlib
import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import EvalLoopOutput

from ..checkpoint.loader import CheckpointLoader
from ..checkpoint.remote import RemoteRun, is_url, staging_folder
from ..checkpoint.saver import Checkpointer, Contents
from ..checkpoint.state_dict import whole_weights
from ..data.collators import PairRows
from ..data.loader import (
    collating_with,
    host_batches,
    outlive_sigterm,
    read_own,
    rows_of_step,
    skip_batches,
    skipping_with,
    training_order,
)
from ..data.packed_batch import micro_batches_of, tensors_of
from ..modeling.adapters import save_adapter_config
from ..modeling.stacked import LayerStack
from ..parallel.shard import keep_activations_split, place_model, plan_model, scatter_gradients
from ..parallel.shard_report import ShardReport
from ..runtime import PartitionSpec, Runtime
from .agreement import HostAgreement, check_alike, describe_run, order_of_pairs, rows_of_host
from .callbacks import exported_state, keeping_two, report_pushes, watches_saves
from .evaluation import PairEvaluator
from .metrics import RewardMetrics, on_host, over_processes
from .nonfinite import Counted, NonfiniteGuard
from .optimizer import StepState, bare
from .preemption import SAVE_INTERVAL, SIGTERM, TIME_LIMIT, EvaluationCutShort, Preemption, Unfinished
from .progress import OpenSums, save_progress
from .recompile_guard import RecompileGuard

if TYPE_CHECKING:
    from ..trainer.reward_config import RewardConfig

logger = logging.getLogger(__name__)


class BatchPlan(Protocol):
    """How the batches of a run are laid out; see `trl_tpu.trainer.batch_plan`."""

    @property
    def layout(self) -> str:
        """ "packed" or "padded": what a resumed run must not change."""

    @property
    def shapes(self) -> int | None:
        """How many batch shapes training will see, where that is planned."""

    @property
    def accumulates(self) -> bool:
        """Whether some batches take micro-batches that only add up gradients."""

    def collator(self, dataset: Any, batch_size: int, user_collator: Any) -> Any:
        """Return what turns examples of ``dataset`` into a batch for the device."""


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

    def __init__(self, *, runtime: Runtime, batch_plan: BatchPlan, **kwargs: Any) -> None:
        self.runtime, self.batch_plan = runtime, batch_plan
        super().__init__(**kwargs)
        args, writes = self.args, self.args.should_save
        self.remote = None if args.output_url is None else RemoteRun(args.output_url)
        shares_disk = self.remote is None and not args.save_on_each_node
        self.agreement = HostAgreement(runtime, self.accelerator)
        self.preemption = Preemption(args.time_limit, args.save_interval)
        self.nonfinite = NonfiniteGuard(self._nonfinite_limit(), runtime, args.device, self.accelerator)
        self.reward_metrics = RewardMetrics(runtime, args.device, skips_nonfinite=self.nonfinite.is_on)
        self.open_sums = OpenSums(runtime, self.reward_metrics, self.nonfinite, self.accelerator)
        self.evaluator = PairEvaluator(runtime, self.accelerator, self.agreement, self.reward_metrics, args)
        self.recompiles = RecompileGuard(runtime, None)  # training begins with one that knows its plan
        self.checkpointer = Checkpointer(
            runtime,
            self.agreement,
            writes=writes,
            takes_part=runtime.shares_mesh or writes,
            shares_disk=shares_disk,
            limit=args.save_total_limit,
            remote=self.remote,
        )
        self.checkpoints = CheckpointLoader(
            runtime,
            self.agreement,
            str(args.output_dir),
            shares_disk=shares_disk,
            remote=self.remote,
            local_index=args.local_process_index,
        )
        self._accumulates = args.gradient_accumulation_steps > 1
        self._step_state = StepState(runtime, self._accumulates or batch_plan.accumulates)
        self._stack: LayerStack | None = None
        self._order: dict[str, Any] = {}  # what the pairs of each step of this training depend on
        self._trial: Any = None
        self.add_callback(_StepEdges(self))

    def _nonfinite_limit(self) -> int:
        """Return 0 where steps that are not finite are somebody else's: a loss scale's, accelerate's, float16's."""
        scaled = self.accelerator.scaler is not None or self.is_fsdp_enabled or self.is_deepspeed_enabled
        is_half = any(parameter.dtype == torch.float16 for parameter in self.model.parameters())
        return 0 if scaled or is_half else self.args.nonfinite_limit

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
        self._trial = trial
        self._order = order_of_pairs(self.args, self.accelerator.num_processes, self.train_dataset)
        with preemption.hearing_sigterm(listens=not self.args.enable_jit_checkpoint):
            try:
                self._check_hosts(resume_from_checkpoint)
                checkpoint = self.checkpoints.find(resume_from_checkpoint, self.batch_plan.layout, self._order)
                output = super().train(checkpoint, trial, ignore_keys_for_eval)
            finally:
                self._unstack()
                self.checkpoints.drop_download()
        if preemption.stopped_by is not None and (preemption.stopped_by == SIGTERM or preemption.told_to_stop):
            raise self.unfinished(SIGTERM)
        if preemption.told_to_stop:  # after the last step, where we do not save
            preemption.pass_on_sigterm()
        return output

    @property
    def stopped_by(self) -> str | None:
        """What ended the last `train()` before its end: "training_time_limit" or "SIGTERM"."""
        return self.preemption.stopped_by

    @property
    def stop_checkpoint(self) -> str:
        """The folder, or URL, that was saved at the last step's end, if that was a stop."""
        run = self._get_output_dir(self._trial) if self.remote is None else self.remote.url
        return os.path.join(run, f"checkpoint-{self.state.global_step}")

    def unfinished(self, reason: str) -> Unfinished:
        """Return what to raise after a stop."""
        return Unfinished(reason, self.stop_checkpoint, self.stop_checkpoint not in self.checkpointer.failed)

    def _check_hosts(self, resume: str | bool | None) -> None:
        """Refuse hosts of a mesh that would not train the same run."""
        if self.runtime.shares_mesh and self.agreement.count > 1:
            own = self._order | describe_run(self.args, self.eval_dataset, resume)
            check_alike(self.agreement.all_gather_object(own))

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

    def _parameter_specs(self) -> dict[nn.Parameter, PartitionSpec]:
        """Return the mesh axes of the dimensions of the model's parameters, as they are now."""
        placements = self.shard_report.placements if self.shard_report is not None else {}
        specs = {parameter: placements[name].axes for name, parameter in self.model.named_parameters()}
        return specs | (self._stack.axes if self._stack is not None else {})

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
        return self._device_loader(dataset, description, batch_size, sampler_fn, collate)

    def _device_loader(self, dataset: Any, description: str, batch_size: int, sampler_fn: Any, collate: Any) -> Any:
        """Return our own loader: accelerate's replicates every batch and forgets its settings on resume."""
        is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
        if is_stream:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        else:
            dataset = self._remove_unused_columns(dataset, description=description)
        sampler = None
        if not is_stream and sampler_fn is not None:
            sampler = training_order(dataset, sampler_fn(dataset), self.args.data_seed)
        mesh = self.args.mesh_shape
        own_rows = rows_of_host(self.runtime.topology().local_positions, batch_size, mesh)
        if len(own_rows) < batch_size and isinstance(collate, PairRows) and isinstance(dataset, Dataset):
            dataset, collate = read_own(dataset, collate, own_rows)
        return self.runtime.loader(host_batches(dataset, collate, batch_size, sampler, self.args), mesh.batch_axes)

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
        torch_optimizer = bare(self.optimizer)
        self.runtime.recompute_layers(self.model, self.args.remat_policy)
        if self.args.scan_layers:
            self._stack_layers(torch_optimizer)
        if self.runtime.compiles and self._step_state.prepare(torch_optimizer, self._parameter_specs()):
            self.nonfinite.skip_on_device(torch_optimizer)
        return super().create_scheduler(num_training_steps, optimizer)

    def _stack_layers(self, optimizer: torch.optim.Optimizer) -> None:
        if self._stack is None or self._stack.model is not self.model:
            placements = self.shard_report.placements if self.shard_report is not None else {}
            specs = {name: placement.axes for name, placement in placements.items()}
            self._stack = LayerStack(self.model, specs, self.args.remat_policy, self.runtime)
        self._stack.stack(optimizer)

    def _unstack(self) -> None:
        if self._stack is not None:
            self._stack.unstack()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run one batch, in one or several micro-batches, whose gradients add up and whose losses do."""
        *accumulated, last = micro_batches_of(inputs)
        self._end_micro_batch()
        for rows in accumulated:
            self._tr_loss += self._micro_batch(model, rows, num_items_in_batch)
            self.runtime.step_boundary()
        return self._micro_batch(model, last, num_items_in_batch)

    def _micro_batch(self, model: nn.Module, rows: dict[str, Any], num_items_in_batch: Any) -> torch.Tensor:
        self.recompiles.see(tensors_of(rows))
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
        act = partial(
            super()._maybe_log_save_evaluate, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time
        )
        wishes = self._decide()
        acts = self.control.should_log or self.control.should_evaluate or self.control.should_save
        self.recompiles.pause()
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._log_step(tr_loss, grad_norm, start_time, learning_rate)
        try:
            act(learning_rate=learning_rate)
        except EvaluationCutShort:
            self._stop(SIGTERM)
        wants_save = self.stopped_by is not None or wishes[SAVE_INTERVAL]
        if wants_save and not self.preemption.has_saved(self.state.global_step):
            # the evaluation before it was cut short; or save_strategy="best" has taken the wish away
            self.control.should_save, self.control.should_evaluate = True, False
            act(learning_rate=learning_rate)
        self.recompiles.resume()
        if acts:  # whereupon callbacks may have asked to stop
            self.agreement.decide(self.args, self.state, self.control, {})

    def _decide(self) -> dict[str, bool]:
        """Let all processes take the same decisions; returns what is wished by `Preemption`."""
        control = self.control
        wishes = self.agreement.decide(self.args, self.state, control, self.preemption.wishes)
        if self.stopped_by is not None:  # what the end of an epoch, cut short or not, asks for once more
            control.should_log = control.should_evaluate = control.should_save = False
            return dict.fromkeys(wishes, False)
        reason = next((name for name in (SIGTERM, TIME_LIMIT) if wishes[name]), None)
        if reason is not None:
            self._stop(reason)
        control.should_save |= wishes[SAVE_INTERVAL] and not self.preemption.has_saved(self.state.global_step)
        return wishes

    def _stop(self, reason: str) -> None:
        """Decide to save, and to stop. After the last step of an epoch, what its end asks for is done here and now."""
        control, state = self.control, self.state
        self.preemption.stopped_by = reason
        if float(state.epoch or 0).is_integer():
            DefaultFlowCallback().on_epoch_end(self.args, state, control)
        if reason == SIGTERM and control.should_evaluate:
            control.should_evaluate = False
            logger.warning("The evaluation due at step %s is left out, to save and stop in time.", state.global_step)
        control.should_save = control.should_training_stop = True

    def _log_step(
        self, tr_loss: torch.Tensor, grad_norm: torch.Tensor | float | None, start_time: float, rate: float | None
    ) -> None:
        """Log what was added up since the last log: one stop of the device."""
        self.runtime.step_boundary()
        norm = grad_norm if isinstance(grad_norm, torch.Tensor) else torch.tensor(float(grad_norm or 0.0))
        counts = self.nonfinite.device_counts
        loss, norm, counts, *sums = self.runtime.fetch([tr_loss, norm, counts, *self.reward_metrics.device_sums])
        open_sums, loss_sum = over_processes(self.accelerator, on_host(sums), loss.item())
        self._tr_loss = self.nonfinite.start_loss_sum()
        counted = self.nonfinite.close(counts)
        steps = self.state.global_step - self._globalstep_last_logged - counted.nonfinite
        logs = {"loss": loss_sum / steps} if steps else {}
        if grad_norm is not None and not counted.in_a_row:
            logs["grad_norm"] = norm.item()
        logs["learning_rate"] = self._get_learning_rate() if rate is None else rate
        logs |= self.reward_metrics.close(open_sums)
        if self.nonfinite.is_on:
            logs["nonfinite"] = counted.nonfinite
        self._total_loss_scalar += loss_sum
        self._globalstep_last_logged = self.state.global_step
        self.store_flos()
        self.log(logs, start_time)
        self._stop_if_nonfinite(counted)

    def _stop_if_nonfinite(self, counted: Counted) -> None:
        """End the run if too many steps in a row were not finite, with the first of them and its pairs named.

        Raises:
            FloatingPointError: They were.
        """
        if not counted.reached_at:
            return
        last = self.state.global_step - counted.taken + counted.reached_at
        first = last - self.nonfinite.limit + 1
        loader = self.callback_handler.train_dataloader
        rows = rows_of_step(loader, first, self.args.gradient_accumulation_steps)
        if self.args.save_strategy == "no":
            weights = "not saved, as save_strategy='no'"
        else:
            self._save_checkpoint(self.model, None)
            self.checkpointer.wait()
            weights = f"in checkpoint-{self.state.global_step}"
        raise FloatingPointError(self.nonfinite.explain(first, last, rows, weights))

    # ---- evaluation

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the loss, the rewards [P, 2] and labels [P] of one batch, on the device."""

        def evaluate(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad(), self.compute_loss_context_manager():
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            return loss.detach(), self.rewards_of(outputs, inputs).detach()

        loss, rewards_P2 = self.evaluator.batch(self._prepare_inputs(inputs), evaluate)
        if prediction_loss_only:
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
        model = self.evaluator.model(self.model, self.optimizer, casts=not self.is_in_train)
        self.callback_handler.eval_dataloader = dataloader

        def after_batch(count: int) -> None:
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            if self.is_in_train and self.agreement.any_in_evaluation(count, self.preemption.told_to_stop):
                raise EvaluationCutShort

        def predict(rewards_P2: torch.Tensor, labels_P: torch.Tensor) -> torch.Tensor:
            predictions = self.predictions_of(rewards_P2)
            process = self.preprocess_logits_for_metrics
            return predictions if process is None else process(predictions, labels_P)

        def evaluate(inputs: dict[str, Any]) -> Any:
            return self.prediction_step(model, inputs, False, ignore_keys)

        return self.evaluator.run(dataloader, evaluate, after_batch, predict, self.compute_metrics, metric_key_prefix)

    def rewards_of(self, outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the rewards [P, 2] in what `compute_loss` returned beside the loss."""
        raise NotImplementedError

    def predictions_of(self, rewards_P2: torch.Tensor) -> torch.Tensor:
        """Return what metrics are computed from."""
        return rewards_P2

    # ---- checkpoints

    @property
    def _keeps_state(self) -> bool:
        """Whether checkpoints hold state of ours; accelerate's FSDP and DeepSpeed have their own."""
        return not (self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapters, as safetensors with config and tokenizer beside it."""
        folder = str(output_dir or self.args.output_dir)
        remote = self.remote if folder == str(self.args.output_dir) else None
        if is_url(folder):
            folder, remote = staging_folder(folder), RemoteRun(folder)
        failed: OSError | None = None
        try:
            if self.runtime.compiles:
                self._save(folder, whole_weights(self.model, self.runtime, keeps=self.args.should_save))
            else:
                super().save_model(folder, _internal_call=True)
            if remote is not None and self.args.should_save:
                remote.put(Path(folder), [path.name for path in Path(folder).iterdir() if path.is_file()])
        except OSError as error:
            failed = error
        # the other hosts wait here, since they may read it next
        said = [each for each in self.runtime.all_gather_object(failed and str(failed)) if each is not None]
        if said:
            raise failed or OSError(f"The model could not be written on another host: {said[0]}")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint beside training: see `trl_tpu.checkpoint.saver` for its road."""
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        hub_id = self.args.hub_model_id
        try:
            self.create_model_card(model_name=hub_id.split("/")[-1] if hub_id else None)
        except OSError as error:  # the save itself says more
            logger.error("The model card could not be written: %s", error)
        self.checkpointer.wait()  # the best one so far may be on its way
        contents = self._contents(Path(self._get_output_dir(trial)))
        self.checkpointer.save(contents)
        self.preemption.note_save(self.state.global_step)
        final = contents.run_folder / contents.name
        if self.args.push_to_hub or any(map(watches_saves, self.callback_handler.callbacks)):
            self.checkpointer.wait()  # they look for the folder
        if self.args.push_to_hub and final.is_dir():
            report_pushes(self)
            self._push_from_checkpoint(str(final))

    def _contents(self, run_folder: Path) -> Contents:
        step = self.state.global_step
        if self.state.best_global_step:
            best = run_folder / f"checkpoint-{self.state.best_global_step}"
            if best.is_dir() or self.state.best_global_step == step:
                self.state.best_model_checkpoint = str(best)
        best_checkpoint = self.state.best_model_checkpoint
        return Contents(
            name=f"checkpoint-{step}",
            run_folder=run_folder,
            describe=self._describe_checkpoint,
            model=self.model if self._keeps_state else None,
            optimizer=None if self.args.save_only_model else bare(self.optimizer),
            save_weights=lambda folder, weights: self._save(str(folder), weights),
            best=None if best_checkpoint is None else Path(best_checkpoint).name,
        )

    def _describe_checkpoint(self, folder: Path) -> None:
        """Write what is small, which `Checkpointer` puts the tensors beside. All processes take part."""
        args, path = self.args, str(folder)
        if not self._keeps_state:
            super().save_model(path, _internal_call=True)
        elif self.runtime.topology().process_count > 1 and args.save_only_model:
            self._save(path, whole_weights(self.model, self.runtime, keeps=args.should_save))
        elif isinstance(self.model, PreTrainedModel):
            self._save(path, {})
        elif args.should_save:
            save_adapter_config(self.model, self.processing_class, path)
        if not args.save_only_model:
            if self._keeps_state:
                self._save_progress(folder)
            else:
                self._save_optimizer_and_scheduler(path)
            self._save_scaler(path)
            if args.should_save or not self.runtime.shares_mesh:
                self._save_rng_state(path)
        if args.should_save:
            callbacks: Any = exported_state([*self.callback_handler.callbacks, self.control])
            if self.stopped_by is not None:
                # in the form of a callback's state; transformers ignores those that it has no callback for
                callbacks[Preemption.__name__] = {"args": {}, "attributes": {"stopped_by": self.stopped_by}}
            self.state.stateful_callbacks = callbacks
            self.state.save_to_json(os.path.join(path, TRAINER_STATE_NAME))

    def _save_progress(self, folder: Path) -> None:
        open_sums = self.open_sums.state_dict(self._tr_loss)
        if self.args.should_save:
            optimizer, layout = bare(self.optimizer), self.batch_plan.layout
            logged = self._globalstep_last_logged
            save_progress(folder, open_sums, logged, self.model, optimizer, self.lr_scheduler, layout, self._order)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.checkpoints.load_weights(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self.stopped_by == SIGTERM:
            return
        best = str(self.state.best_model_checkpoint)
        if self.checkpoints.load_best(self.model, best):
            logger.info("Loaded the best model, from %s (score: %s).", best, self.state.best_metric)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with self._stack.one_by_one() if self._stack is not None else contextlib.nullcontext():
            optimizer = bare(self.optimizer)
            ours = self._keeps_state and self.checkpoints.load_optimizer(
                self.model, optimizer, self.lr_scheduler, checkpoint
            )
            if not ours:
                super()._load_optimizer_and_scheduler(checkpoint)

    def _resume_sums(self) -> None:
        """Go on adding up where the checkpoint was between two logs."""
        progress, self.checkpoints.progress = self.checkpoints.progress, None
        self.nonfinite.start()
        self._tr_loss = self.nonfinite.start_loss_sum()
        if progress is None:
            return
        open_loss = self.open_sums.load_state_dict(progress["processes"])
        self._tr_loss = self.runtime.to_device(torch.tensor([open_loss]), self.args.device)
        self._total_loss_scalar = -open_loss  # `train_loss` is of the steps since the resume
        self._globalstep_last_logged = progress["logged_step"]

    # ---- after the last step

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._unstack()  # before the best model is loaded and callbacks look at the model
        if self.nonfinite.is_on:
            self._leave_nonfinite_out()
        self.checkpointer.wait()  # one that is written may delete older ones by the limit
        if self.accelerator.num_processes > 1:
            self.accelerator.wait_for_everyone()  # launchers end all processes when one has ended
        if self.stopped_by is not None:
            done, of = self.state.global_step, self.state.max_steps
            logger.warning("At step %s of %s: %s.", done, of, self.unfinished(self.stopped_by))
        with keeping_two(self.args) if self.stopped_by is not None else contextlib.nullcontext():
            result = super()._finalize_training(*args, **kwargs)
        report_pushes(self)
        if self.checkpointer.failed:
            logger.error("These checkpoints were NOT saved: %s", ", ".join(self.checkpointer.failed))
        return result

    def _leave_nonfinite_out(self) -> None:
        """Take the steps that are not finite out of the mean that `train_loss` is, also those since the last log."""
        counts, open_loss = self.runtime.fetch([self.nonfinite.device_counts, self._tr_loss])
        self._stop_if_nonfinite(self.nonfinite.close(counts))
        nonfinite = self.nonfinite.total
        if nonfinite:
            steps = self.state.global_step - self._initial_global_step
            total = self._total_loss_scalar + open_loss.item()
            self._tr_loss = self.nonfinite.start_loss_sum()
            self._total_loss_scalar = total * steps / (steps - nonfinite) if steps > nonfinite else float("nan")


class _StepEdges(TrainerCallback):
    """Calls components at points of the loop where only callbacks are called."""

    def __init__(self, trainer: DeviceTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self._trainer
        trainer.runtime.step_boundary()  # what placed and loaded the model is no part of the first step
        trainer._resume_sums()
        trainer.agreement.start(state.global_step)
        # a resumed run compares this with its own argument, and would warn of a change on every mesh
        state.train_batch_size = args.per_device_train_batch_size
        if trainer.runtime.compiles:
            shared = int(trainer._accumulates)
            trainer.recompiles = RecompileGuard(trainer.runtime, trainer.batch_plan.shapes, shared_programs=shared)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.nonfinite.begin_step(self._trainer._tr_loss)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.agreement.postpone(control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.recompiles.check()
        self._trainer.preemption.note_step(state.global_step, state.max_steps)
