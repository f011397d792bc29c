"""A custom training loop with the public step functions equals the trainer, and each obeys every setting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import every_setting
import own_loop
import pytest
import tiny
import torch
from peft import LoraConfig
from training import QUIET, logged, trained, untimed

from trl_tpu import RewardConfig, RewardTrainer, TrainState, evaluation_step, training_step
from trl_tpu.config.checks import SETTINGS
from trl_tpu.errors import UserError


def test_own_loop_has_the_trainers_losses_rates_and_weights(config: Any, model_folder: str, tmp_path: Path) -> None:
    """An epoch has six batches. An update takes four of them or the last two."""
    settings = {"gradient_accumulation_steps": 4, "optim_state_dtype": "bfloat16", "log_grad_norms": True}
    compiled = own_loop.compare(config, model_folder, tmp_path, **settings)
    assert set(compiled) == {None}  # plain torch compiles nothing


def test_steps_return_the_metrics_of_their_batches(config: Any, model_folder: str) -> None:
    """With adapters, and with a nonfinite step, which changes no weight."""
    data: dict[str, Any] = {"train_dataset": tiny.made_up_pairs(24), "eval_dataset": tiny.made_up_pairs(13, seed=1)}
    data["peft_config"] = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"])
    settings = {"max_steps": 5, "logging_steps": 1, "gradient_accumulation_steps": 2}
    state = TrainState(model_folder, config(**settings), **data)
    trainer = trained(RewardTrainer(model_folder, config(**settings), **data))
    for batch, expected in zip(state.batches(), trainer.state.log_history, strict=False):
        metrics = training_step(state, batch)
        assert {*metrics} < {*expected} and all(each.ndim == 0 for each in metrics.values())
        found = {name: each.item() for name, each in metrics.items()}
        assert found == pytest.approx({name: expected[name] for name in found}, abs=1e-6)
    batches = [evaluation_step(state, batch) for batch in state.eval_batches()]
    expected = trainer.evaluate()
    pairs = [each["is_real"].sum().item() for each in batches]
    for name in ("loss", "accuracy", "margin", "mean_reward"):
        mean = sum(each[name].item() * count for each, count in zip(batches, pairs, strict=True)) / sum(pairs)
        assert mean == pytest.approx(expected[f"eval_{name}"], abs=1e-6), name
    chosen_P, rejected_P = torch.cat([each["rewards"][each["is_real"]] for each in batches]).unbind(1)
    assert (chosen_P - rejected_P).mean().item() == pytest.approx(expected["eval_margin"], abs=1e-6)

    before = [each.detach().clone() for each in state.model.parameters()]
    head = next(each for name, each in state.model.named_parameters() if "score" in name and each.requires_grad)
    head.data.fill_(float("inf"))
    training_step(state, batch)
    head.data.copy_(next(each for each, now in zip(before, state.model.parameters(), strict=True) if now is head))
    assert all(map(torch.equal, before, state.model.parameters()))


@pytest.mark.parametrize(
    "setting",
    [{"save_strategy": "steps"}, {"eval_strategy": "epoch"}, {"logging_steps": 0.1}, {"logging_strategy": "epoch"}],
    ids=str,
)
def test_example_rejects_unsupported_settings(config: Any, setting: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match=f"--{next(iter(setting))}"):
        own_loop.example().check(config(**setting))


def test_step_functions_give_advice_on_easydels_arguments() -> None:
    for function, name, advice in (
        (training_step, "learning_rate_fn", "lr_scheduler_type"),
        (evaluation_step, "partition_spec", "mesh"),
        (TrainState, "loss_config", "nonfinite_limit"),
    ):
        with pytest.raises(TypeError, match=f"{name}: use {advice}"):
            function(**{name: None})  # type: ignore[operator]


def test_statistics_go_on_after_a_failed_evaluation(config: Any, model_folder: str) -> None:
    state = TrainState(model_folder, config(max_steps=2), tiny.made_up_pairs(16))
    with pytest.raises(ValueError):  # there is no evaluation data
        state.evaluate()
    for batch in state.batches():
        training_step(state, batch)
    assert state.log()["pairs_per_second"] > 0


# ---- settings

#: Left to the caller's loop.
LEFT = {
    *("eval_strategy", "eval_steps", "eval_delay", "logging_strategy", "logging_steps", "logging_first_step"),
    *("save_strategy", "save_steps", "save_total_limit", "save_only_model"),
    *("greater_is_better", "metric_for_best_model"),
    *("ignore_data_skip", "restore_callback_states_from_checkpoint"),  # for resumed runs
    "batch_eval_metrics",  # for `compute_metrics`, an argument of the trainer
}
#: Values of settings that change a step's numbers, logs or activations.
CHANGES: list[dict[str, Any]] = [
    {"gradient_checkpointing": False},
    {"remat": "dots"},
    {"activation_offloading": True},
    {"neftune_noise_alpha": 5.0},
    {"disable_dropout": False},
    {"include_num_input_tokens_seen": "non_padding"},
    {"log_grad_norms": True, "max_grad_norm": 0.0},
    {"bf16": True, "use_cpu": True, "optim_state_dtype": "bfloat16"},
    {"nonfinite_limit": 0, "logging_nan_inf_filter": True},
    {"optim": "adafactor", "lr_scheduler_type": "cosine", "learning_rate_end": 1e-5},
    {"frozen_parameters": "embed", "weight_decay": 0.1},
    {"group_by_prompt": True, "torch_empty_cache_steps": 1},
    {"packing": False, "gradient_accumulation_steps": 2, "accelerator_config": {"split_batches": True}},
]


def test_every_setting_is_read_rejected_or_left_to_the_loop(tmp_path: Path) -> None:
    of_loop = [name for name, each in SETTINGS.items() if "loop" in [no.where for no in each.rejected]]
    rejected = {name: every_setting.ASKED.get(name, True) for name in of_loop}
    rejected |= {"lr_scheduler_type": "greedy", "progress": "json", "training_time_limit": "1h", "report_to": "wandb"}
    rejected["skip_memory_metrics"] = False
    pairs = tiny.made_up_pairs(8)
    tokenizer = tiny.tiny_tokenizer(pairs)
    for name, value in rejected.items():
        args = RewardConfig(str(tmp_path))
        setattr(args, name, value)
        with pytest.raises(UserError, match=f"^{name}=.* impossible without RewardTrainer's loop"):
            TrainState("no model is loaded", args, pairs)
    with pytest.raises(ImportError, match="liger"):  # not installed, but asked for
        args = RewardConfig(str(tmp_path), use_liger_kernel=True)
        TrainState(tiny.tiny_model(tokenizer), args, pairs, pairs, tokenizer)
    every_setting.Recording.read.clear()
    settings = QUIET | {"max_steps": 1, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    args = every_setting.Recording(str(tmp_path), **settings)
    state = TrainState(tiny.tiny_model(tokenizer), args, pairs, pairs, tokenizer)
    for batch in state.batches():
        training_step(state, batch)
    state.evaluate()
    state.save_model()
    unread = every_setting.IN_A_RUN - every_setting.Recording.read - LEFT - {*rejected}
    assert not unread, unread


def test_settings_change_a_step_as_in_the_trainer(config: Any, model_folder: str, tmp_path: Path) -> None:
    """Logs are equal, and so are the activations that are saved for the backward."""
    sizes = set[int]()

    def measured(train: Callable[[], list[dict[str, Any]]]) -> tuple[list[dict[str, Any]], int]:
        kept = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return train(), kept

    def by_trainer() -> list[dict[str, Any]]:
        return logged(trained(RewardTrainer(model_folder, args, train_dataset=pairs)))

    def by_steps() -> list[dict[str, Any]]:
        state, logs = TrainState(model_folder, args, pairs), []
        for batch in state.batches():
            training_step(state, batch)
            logs.append(untimed(state.log()))
        return logs

    pairs = tiny.uneven_pairs(22)
    for settings in ({}, *CHANGES):
        args = config(max_steps=2, logging_steps=1, **settings)
        (expected, size), (logs, own_size) = map(measured, (by_trainer, by_steps))
        assert logs == [{name: log[name] for name in log if name != "epoch"} for log in expected], settings
        assert size == own_size, settings
        sizes.add(size)
    assert len(sizes) >= 6


# ---- settings of the trainer


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("check", every_setting.CHECKS)
def test_every_setting_is_applied_rejected_or_listed(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)
