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
from training import trained, untimed

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.state_dict import to_host

_SCORE = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
assert "torch_xla" not in sys.modules
folder, kind, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if kind == "adapter":
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
    words = ["-c", _SCORE, str(folder), kind, json.dumps(texts)]
    process = apart.python(*words, environment=os.environ | {"USE_TORCH_XLA": "0"})
    assert process.returncode == 0, process.stderr[-3000:]
    return torch.tensor(json.loads(process.stdout.splitlines()[-1])).view(-1, 2)


def test_saved_model_gives_the_same_rewards(config: Callable[..., Any], model_folder: str, tmp_path: Path) -> None:
    args = config(max_steps=3, logging_steps=3)
    trainer = trained(RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(40)))
    held_out = tiny.made_up_pairs(5, seed=1)
    rewards_P2 = torch.from_numpy(trainer.predict(held_out).predictions)
    trainer.save_model(str(tmp_path / "saved"))
    files = os.listdir(tmp_path / "saved")
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= set(files)
    reloaded_P2 = score_in_plain_torch(tmp_path / "saved", "model", held_out)
    torch.testing.assert_close(rewards_P2, reloaded_P2, atol=1e-5, rtol=0)
    started = load_file(f"{model_folder}/model.safetensors")
    ended = load_file(tmp_path / "saved" / "model.safetensors")
    assert started.keys() == ended.keys()
    assert all(started[name].shape == ended[name].shape for name in started)
    assert not torch.equal(started["score.weight"], ended["score.weight"])


def test_lora_trains_saves_and_leaves_the_base_frozen(
    config: Callable[..., Any], model_folder: str, tmp_path: Path
) -> None:
    args = config(max_steps=3, logging_steps=3)
    trainer = RewardTrainer(
        model_folder, args, train_dataset=tiny.made_up_pairs(40), peft_config=LoraConfig(task_type="SEQ_CLS", r=8)
    )
    runtime = trainer.trl_tpu.runtime
    before = to_host(dict(trainer.model.named_parameters()), runtime)
    trainer.train()
    after = to_host(dict(trainer.model.named_parameters()), runtime)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(before[name], after[name]) is not parameter.requires_grad, name
    held_out = tiny.made_up_pairs(4, seed=1)
    rewards_P2 = torch.from_numpy(trainer.predict(held_out).predictions)
    trainer.save_model(str(tmp_path / "adapter"))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all("lora_" in name or "score" in name for name in saved)
    reloaded_P2 = score_in_plain_torch(tmp_path / "adapter", "adapter", held_out)
    torch.testing.assert_close(rewards_P2, reloaded_P2, atol=1e-5, rtol=0)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.long), 2])
def test_resumed_run_equals_the_uninterrupted_one(
    config: Callable[..., Any], model_folder: str, tmp_path: Path, accumulation: int
) -> None:
    """Losses, metrics and the token count; the log at step 10 spans the save at step 9, within a later epoch."""
    settings = {
        "max_steps": 11,
        "logging_steps": 10,
        "save_strategy": "steps",
        "save_steps": 9,
        "logging_strategy": "steps",
        "gradient_accumulation_steps": accumulation,
        "warmup_steps": 2,
    }
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


@pytest.mark.eight
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
    padded, whole, resumed = (
        [untimed(log) for log in run.state.log_history if "train_loss" not in log] for run in runs
    )
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
