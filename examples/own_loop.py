"""A training loop of your own, from the step functions of `trl_tpu`, with the losses and weights of `RewardTrainer`.

    # plain torch; PyTorch/XLA on eight devices; two processes of plain torch
    USE_TORCH_XLA=0 python examples/own_loop.py --config examples/quickstart.yaml --model_name_or_path runs/quickstart
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 python examples/own_loop.py --config examples/quickstart.yaml \
        --model_name_or_path runs/quickstart --per_device_train_batch_size 4
    USE_TORCH_XLA=0 torchrun --nproc_per_node 2 examples/own_loop.py --config examples/quickstart.yaml \
        --model_name_or_path runs/quickstart --mesh fsdp=2
"""

from collections.abc import Iterator
from typing import Any

import trl_tpu
from trl_tpu import ModelConfig, RewardConfig, ScriptArguments, TrainState, TrlParser

# Settings that this loop supports. `TrainState` rejects the other settings of the trainer's loop, such as report_to.
SUPPORTED: dict[str, Any] = {"save_strategy": ["no"], "logging_strategy": ["steps"], "eval_strategy": ["no", "steps"]}
SUPPORTED |= {"logging_first_step": [False], "eval_delay": [None, 0]}


def check(args: RewardConfig) -> None:
    """Reject settings that this loop does not support."""
    for name, values in SUPPORTED.items():
        if getattr(args, name) not in values:
            raise SystemExit(f"own_loop.py: --{name} must be {values[-1]} here.")
    if args.logging_steps % 1 or (args.eval_steps or 0) % 1:
        raise SystemExit("own_loop.py: --logging_steps and --eval_steps must be numbers of steps here, not shares.")


def train(state: TrainState) -> Iterator[dict[str, float]]:
    """Train, evaluate and save; yield the logs."""
    args = state.args
    for batch in state.batches():
        trl_tpu.training_step(state, batch)  # its metrics on the device are not read here
        if state.step % args.logging_steps == 0:
            yield state.log()
        is_due = args.eval_strategy == "steps" and state.step % args.eval_steps == 0
        if args.do_eval and (is_due or state.step == state.max_steps):
            yield {"step": state.step, **state.evaluate()}
    state.save_model()


def main(script_args: ScriptArguments, args: RewardConfig, model_args: ModelConfig) -> None:
    check(args)

    def load(split: str) -> Any:
        part = {"path": script_args.dataset_name, "name": script_args.dataset_config, "split": split}
        mixture = trl_tpu.DatasetMixtureConfig([part], streaming=script_args.dataset_streaming)
        return trl_tpu.get_dataset(mixture)["train"]

    flags = {"revision": "model_revision", "dtype": "dtype", "attn_implementation": "attn_implementation"}
    of_model = {name: value for name, flag in flags.items() if (value := getattr(model_args, flag)) is not None}
    args.model_init_kwargs = of_model | (args.model_init_kwargs or {})
    state = TrainState(
        model_args.model_name_or_path,
        args,
        train_dataset=load(script_args.dataset_train_split),
        eval_dataset=load(script_args.dataset_test_split) if args.do_eval else None,
        quantization_config=trl_tpu.get_quantization_config(model_args),
        peft_config=trl_tpu.get_peft_config(model_args),
    )
    for logs in train(state):
        if args.process_index == 0:
            print(logs)


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, RewardConfig, ModelConfig)).parse_args_and_config())
