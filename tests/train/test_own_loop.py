"""A custom training loop with the public step functions equals the trainer in plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_loop
import pytest
import tiny
import torch
from peft import LoraConfig
from training import trained

from trl_tpu import RewardTrainer, TrainState, evaluation_step, training_step
from trl_tpu.errors import UserError


def test_own_loop_has_the_trainers_losses_rates_and_weights(
    config: Callable[..., Any], model_folder: str, tmp_path: Path
) -> None:
    """An epoch has six batches. An update takes four of them or the last two."""
    settings = {"gradient_accumulation_steps": 4, "optim_state_dtype": "bfloat16", "log_grad_norms": True}
    compiled = own_loop.compare(config, model_folder, tmp_path, **settings)
    assert set(compiled) == {None}  # plain torch compiles nothing


def test_steps_return_the_metrics_of_their_batches(config: Callable[..., Any], model_folder: str) -> None:
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
def test_example_rejects_unsupported_settings(config: Callable[..., Any], setting: dict[str, Any]) -> None:
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


def test_statistics_go_on_after_a_failed_evaluation(config: Callable[..., Any], model_folder: str) -> None:
    state = TrainState(model_folder, config(max_steps=2), tiny.made_up_pairs(16))
    with pytest.raises(ValueError):  # there is no evaluation data
        state.evaluate()
    for batch in state.batches():
        training_step(state, batch)
    assert state.log()["pairs_per_second"] > 0


@pytest.mark.parametrize(
    "setting",
    [
        {"training_time_limit": "1h"},
        {"progress": "json"},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
    ],
    ids=str,
)
def test_train_state_rejects_settings_of_the_trainers_loop(
    config: Callable[..., Any], setting: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=next(iter(setting))):
        TrainState("no model is loaded", config(**setting), tiny.made_up_pairs(8))
