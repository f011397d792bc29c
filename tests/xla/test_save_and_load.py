"""Models saved on XLA load in plain torch and give the same rewards."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from training import STEPS, At, logged, make_trainer, sigterm, trained

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.state_dict import to_host
from trl_tpu.training.stopping import Unfinished


@pytest.mark.parametrize("peft", [None, LoraConfig(task_type="SEQ_CLS", r=8)], ids=["model", "adapter"])
def test_saved_model_gives_the_same_rewards_and_keeps_frozen_weights(
    config: Callable[..., Any], model_folder: str, tmp_path: Path, peft: Any
) -> None:
    args, pairs = config(max_steps=3, logging_steps=3), tiny.made_up_pairs(40)
    trainer = RewardTrainer(model_folder, args, train_dataset=pairs, peft_config=peft)
    runtime = trainer.trl_tpu.runtime
    before = to_host(dict(trainer.model.named_parameters()), runtime)
    trainer.train()
    after = to_host(dict(trainer.model.named_parameters()), runtime)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(before[name], after[name]) is not parameter.requires_grad, name
    held_out = tiny.made_up_pairs(5, seed=1)
    rewards_P2 = trainer.predict(held_out).predictions
    folder, kind = tmp_path / "saved", "model" if peft is None else "adapter_model"
    trainer.save_model(str(folder))
    assert {f"{kind}.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(os.listdir(folder))
    saved = load_file(folder / f"{kind}.safetensors")
    if peft is None:
        assert {name: each.shape for name, each in saved.items()} == {name: each.shape for name, each in after.items()}
    else:
        assert all("lora_" in name or "score" in name for name in saved)
    texts = [row["prompt"] + row[half] for row in held_out for half in ("chosen", "rejected")]
    assert rewards_P2.flatten().tolist() == pytest.approx(tiny.rewards_alone(folder, texts), abs=1e-5)


def test_resumed_run_on_rankings_is_bitwise_equal(
    config: Callable[..., Any], model_folder: str, tmp_path: Path
) -> None:
    """A padded run equals it up to rounding, in logs and in predictions, also for prompts with fewer answers.

    The save is within the second epoch and within the interval of a log.
    """
    settings: dict[str, Any] = {"max_steps": 6, "logging_steps": 3, "save_strategy": "steps", "save_steps": 4}
    settings |= {"eval_strategy": "steps", "eval_steps": 4, "optim_state_dtype": "bfloat16"}
    data = {"train_dataset": tiny.made_up_rankings(20), "eval_dataset": tiny.made_up_rankings(13, seed=1)}
    runs = [
        RewardTrainer(model_folder, config(**settings, packing=packing), **data) for packing in (False, True, True)
    ]
    for run, resume in zip(runs, (None, None, str(tmp_path / "checkpoint-4")), strict=True):
        run.train(resume_from_checkpoint=resume)
    padded, whole, resumed = map(logged, runs)
    assert resumed == whole and len(whole) == 4
    for ours, theirs in zip(whole, padded, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    rewards = [run.predict(data["eval_dataset"]).predictions for run in runs]
    np.testing.assert_array_equal(rewards[2], rewards[1])
    np.testing.assert_allclose(rewards[1], rewards[0], atol=1e-5, rtol=0)
    assert rewards[0].shape == (13, 5) and np.isnan(rewards[0]).any()


def test_run_stopped_in_an_evaluation_resumes_without_it(model_folder: str, tmp_path: Path) -> None:
    """The run is stopped twice: in the evaluation after step 2, and at the last step."""
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    whole = trained(make_trainer(model_folder, tmp_path / "whole", **settings))
    for event, step in (("on_prediction_step", 2), ("on_step_begin", STEPS - 1)):
        stopped = make_trainer(model_folder, tmp_path / "stopped", At(event, step, sigterm), **settings)
        with pytest.raises(Unfinished):
            stopped.train(resume_from_checkpoint=True if step > 2 else None)
    resumed = trained(make_trainer(model_folder, tmp_path / "stopped", **settings), resume=True)
    left_out = {2, STEPS}
    assert logged(resumed) == [log for log in logged(whole) if "eval_loss" not in log or log["step"] not in left_out]
