"""A training loop of your own: a reward model in packed rows, with evaluation, from this package's parts.

    # PyTorch/XLA: eight devices, one mesh; plain torch: one device
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 python examples/own_loop.py --config examples/quickstart.yaml \
        --per_device_train_batch_size 4
    USE_TORCH_XLA=0 python examples/own_loop.py --config examples/quickstart.yaml

The losses are those of `RewardTrainer`, which besides accumulates over batches, saves and resumes, stops in time, and
takes no step that is not finite.

PyTorch/XLA records what a step does, compiles it once for each shape of a batch, and runs it at the next boundary. So
nothing in a step may read a number or be a new constant: either would stop the devices.
"""

from collections.abc import Iterator
from itertools import chain, islice, repeat
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from transformers import get_scheduler, set_seed

from trl_tpu import ModelConfig, RewardConfig, ScriptArguments, TrlParser
from trl_tpu.checkpoint.state_dict import whole_weights
from trl_tpu.data.loader import host_batches
from trl_tpu.modeling.build import build_dataset, build_reward_model
from trl_tpu.modeling.losses import Loss
from trl_tpu.parallel.mesh import BATCH_AXES
from trl_tpu.parallel.shard import keep_activations_split, place_model, plan_model
from trl_tpu.runtime import current
from trl_tpu.scripts import synthetic, utils
from trl_tpu.training.batch_plan import BatchPlan
from trl_tpu.training.optimizer import StepState
from trl_tpu.training.statistics import StepStatistics
from trl_tpu.training.step import evaluation_step, training_step


def train(model_name: str, data: Any, args: RewardConfig) -> Iterator[dict[str, float]]:
    """Train on the split "train", evaluate on "test", and save; yield what there is to log."""
    set_seed(args.seed)  # before the model, whose score head may be random
    runtime = current()

    # a model with one output, and pairs as token ids
    model, tokenizer = build_reward_model(model_name, args)
    pairs, held_out = (build_dataset(data[split], model, tokenizer, args, split) for split in ("train", "test"))

    # batches are one row without padding in plain torch, and rows of a few shapes, chosen from the data, on XLA
    batch_plan = BatchPlan(args, model, tokenizer, pairs, runtime)
    batch_plan.prepare(pairs, held_out)

    def batches_of(pairs: Any, batch_size: int, order: Any = None) -> Any:
        collate = batch_plan.collator(pairs, batch_size, batch_plan.default_collator())
        return runtime.loader(host_batches(pairs, collate, batch_size, order, args), BATCH_AXES)

    # each weight in its shards, and activations split as the batch is
    sharding = plan_model(model, args.mesh_shape, args.sharding_rules)
    shards = place_model(model, sharding, runtime, args.device)
    keep_activations_split(model, sharding, shards.placements, runtime)
    if args.activation_checkpointing:
        model.activation_checkpointing_enable()
        runtime.recompute_layers(model, args.remat_policy)

    # in another order in each epoch
    train_batches = batches_of(pairs, args.train_batch_size, SeedableRandomSampler(pairs, data_seed=args.data_seed))
    test_batches = batches_of(held_out, args.eval_batch_size)
    steps = args.max_steps if args.max_steps > 0 else int(len(train_batches) * args.num_train_epochs)

    # on XLA the optimizer's state is there, sharded, before step 1, and the learning rate is data
    # (weight decay is of all weights; transformers spares norms)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=args.weight_decay)
    step_state = StepState(runtime, scanned=None)
    if runtime.is_spmd:
        step_state.prepare(model, shards.placements, optimizer, batch_plan.accumulates)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(steps), steps)

    loss_of = Loss.of(args)
    precision = torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16)

    def evaluate() -> dict[str, float]:
        model.eval()
        statistics = StepStatistics(runtime, args.device)  # summed on the device
        for batch in test_batches:
            with precision:
                result = evaluation_step(model, batch.parts, loss_of, use_cache=False)
            statistics.update(result.rewards_SA, result.tokens_S, result.table)
        runtime.step_boundary()
        return {f"eval_{name}": value for name, value in statistics.read().metrics().items()}

    losses: list[torch.Tensor] = []
    for step, batch in enumerate(islice(chain.from_iterable(repeat(train_batches)), steps), start=1):
        model.train()
        for part in batch.parts:  # one, or several where a batch is too long for one; their losses add up
            runtime.step_boundary()
            step_state.attach_gradients()
            with precision:
                loss = training_step(model, [part], loss_of, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

        if step % args.logging_steps == 0:
            runtime.step_boundary()
            yield {"step": step, "loss": float(sum(runtime.fetch(losses))) / args.logging_steps}
            losses.clear()
        if step == steps or step % (args.eval_steps or steps) == 0:
            yield {"step": step, **evaluate()}

    model.save_pretrained(args.output_dir, state_dict=whole_weights(model, runtime, keeps=True))
    tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    script_args, args, model_args = TrlParser((ScriptArguments, RewardConfig, ModelConfig)).parse_args_and_config()
    model_name = synthetic.resolve_model(str(model_args.model_name_or_path), str(args.output_dir))
    for logs in train(model_name, utils.load_named_dataset(script_args), args):
        print(logs)
