"""What is saved from XLA loads in plain torch, and gives the same rewards."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apart
import numpy as np
import pytest
import tiny
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from stopping import STEPS, At, make_trainer, sigterm
from training import logged, trained

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.state_dict import to_host
from trl_tpu.training.stopping import Unfinished

_SCORE = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
assert "torch_xla" not in sys.modules
folder, kind, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if kind == "adapter_model":
    from peft import AutoPeftModelForSequenceClassification as AutoModelForSequenceClassification
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()
assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
assert tokenizer.chat_template
with torch.no_grad():
    print(json.dumps([model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]))
"""


def score_in_plain_torch(folder: Path, kind: str, pairs: Any) -> torch.Tensor:
    """The rewards [pairs, 2] that the saved model gives in a process without torch_xla."""
    texts = [row["prompt"] + row[answer] + "<eos>" for row in pairs for answer in ("chosen", "rejected")]
    process = apart.run("-c", _SCORE, str(folder), kind, json.dumps(texts), USE_TORCH_XLA="0")
    return torch.tensor(json.loads(process.stdout.splitlines()[-1])).view(-1, 2)


@pytest.mark.parametrize("peft", [None, LoraConfig(task_type="SEQ_CLS", r=8)], ids=["model", "adapter"])
def test_saved_model_gives_the_same_rewards_and_what_is_frozen_stays(
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
    rewards_P2 = torch.from_numpy(trainer.predict(held_out).predictions)
    folder, kind = tmp_path / "saved", "model" if peft is None else "adapter_model"
    trainer.save_model(str(folder))
    assert {f"{kind}.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(os.listdir(folder))
    saved = load_file(folder / f"{kind}.safetensors")
    if peft is None:
        assert {name: each.shape for name, each in saved.items()} == {name: each.shape for name, each in after.items()}
    else:
        assert all("lora_" in name or "score" in name for name in saved)
    reloaded_P2 = score_in_plain_torch(folder, kind, held_out)
    torch.testing.assert_close(rewards_P2, reloaded_P2, atol=1e-5, rtol=0)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.long), 2])
def test_resumed_run_equals_the_uninterrupted_one(
    config: Callable[..., Any], model_folder: str, tmp_path: Path, accumulation: int
) -> None:
    """Losses, metrics and the token count; the log at step 10 spans the save at step 9, within a later epoch."""
    settings = {"max_steps": 11, "logging_steps": 10, "save_strategy": "steps", "save_steps": 9, "warmup_steps": 2}
    settings |= {"gradient_accumulation_steps": accumulation}
    pairs = tiny.made_up_pairs(56)
    whole = trained(RewardTrainer(model_folder, config(**settings), train_dataset=pairs))
    resumed = RewardTrainer(model_folder, config(**settings), train_dataset=pairs)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    for key in ("num_tokens", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "grad_norm"):
        assert resumed.state.log_history[0][key] == pytest.approx(whole.state.log_history[0][key], rel=1e-6), key
    weights = [
        to_host(dict(trainer.model.named_parameters()), trainer.trl_tpu.runtime) for trainer in (whole, resumed)
    ]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-6, rtol=0, msg=name)


def test_a_resumed_run_on_rankings_is_the_same_to_the_bit(
    config: Callable[..., Any], model_folder: str, tmp_path: Path
) -> None:
    """And a padded one to rounding, in what it logs and in what it says of prompts with fewer answers than others."""
    settings: dict[str, Any] = {"max_steps": 6, "logging_steps": 2, "save_strategy": "steps", "save_steps": 3}
    settings |= {"eval_strategy": "steps", "eval_steps": 3}
    data = {"train_dataset": tiny.made_up_rankings(40), "eval_dataset": tiny.made_up_rankings(13, seed=1)}
    runs = [
        RewardTrainer(model_folder, config(**settings, packing=packing), **data) for packing in (False, True, True)
    ]
    for run, resume in zip(runs, (None, None, str(tmp_path / "checkpoint-3")), strict=True):
        run.train(resume_from_checkpoint=resume)
    padded, whole, resumed = map(logged, runs)
    assert resumed == whole and len(whole) == 5
    for ours, theirs in zip(whole, padded, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    rewards = [run.predict(data["eval_dataset"]).predictions for run in runs]
    np.testing.assert_array_equal(rewards[2], rewards[1])
    np.testing.assert_allclose(rewards[1], rewards[0], atol=1e-5, rtol=0)
    assert rewards[0].shape == (13, 5) and np.isnan(rewards[0]).any()


def test_a_second_train_goes_on_with_the_same_optimizer(config: Callable[..., Any], model_folder: str) -> None:
    """Its moments are not made anew, and its learning rate is still fed as a number."""
    trainer = RewardTrainer(model_folder, config(max_steps=2, logging_steps=1), train_dataset=tiny.made_up_pairs(40))
    trainer.train()
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    parameter = optimizer.param_groups[0]["params"][0]
    (steps,) = trainer.trl_tpu.runtime.fetch([optimizer.state[parameter]["step"]])
    assert steps.item() == 4
    assert all(isinstance(group["lr"], float) for group in optimizer.param_groups)


def test_a_run_that_was_stopped_in_an_evaluation_goes_on_without_it(model_folder: str, tmp_path: Path) -> None:
    """Twice: in the evaluation after the second step, and at the last step."""
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    whole = trained(make_trainer(model_folder, tmp_path / "whole", **settings))
    for event, step in (("on_prediction_step", 2), ("on_step_begin", STEPS - 1)):
        stopped = make_trainer(model_folder, tmp_path / "stopped", At(event, step, sigterm), **settings)
        with pytest.raises(Unfinished):
            stopped.train(resume_from_checkpoint=True if step > 2 else None)
    resumed = trained(make_trainer(model_folder, tmp_path / "stopped", **settings), resume=True)
    left_out = {2, STEPS}
    assert logged(resumed) == [log for log in logged(whole) if "eval_loss" not in log or log["step"] not in left_out]
