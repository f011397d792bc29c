"""`resume_from_checkpoint="auto"` stops for another run, and adapters load only into the same adapters."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import trl
from peft import IA3Config, LoraConfig
from safetensors.torch import load_file, save_file
from training import QUIET
from transformers import AutoTokenizer

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.errors import UserError

COSINE = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}


def make(model: str, folder: Path, arguments: Any = None, **settings: Any) -> RewardTrainer:
    """Build a trainer for four steps that saves at step 2 and stops there unless it resumes."""
    defaults = COSINE | QUIET | {"max_steps": 4, "save_steps": 2, "warmup_steps": 1, "per_device_train_batch_size": 2}
    args = RewardConfig(str(folder), **defaults | settings)
    return RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(16), **arguments or {})


def lora(**changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}
    return {"peft_config": LoraConfig(task_type="SEQ_CLS", **settings | changes)}


@pytest.fixture(scope="module")
def first(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Return a function that copies the run's folder with one checkpoint, at step 2, of a model or of its adapters."""
    folders: dict[bool, Path] = {}

    def copy(to: Path, has_adapters: bool = False) -> Path:
        if has_adapters not in folders:
            folders[has_adapters] = folder = tmp_path_factory.mktemp("first")
            make(model_folder, folder, lora() if has_adapters else None).train()
            shutil.rmtree(folder / "checkpoint-4")
        return Path(shutil.copytree(folders[has_adapters], to))

    yield copy


def other_tokenizer(model: str, change: Callable[[Any], None]) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    change(tokenizer)
    return {"processing_class": tokenizer}


def set_template(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Signed(torch.optim.AdamW):
    """Another optimizer with the state of AdamW."""


#: Name of the change in the error -> settings, or a function from the model's folder to arguments of the trainer.
CHANGED: dict[str, Any] = {
    "lr_scheduler_kwargs": {"lr_scheduler_kwargs": {"min_lr": 5e-4}},
    "optim_args": {"optim_args": "amsgrad=False"},
    "train_sampling_strategy": {"train_sampling_strategy": "sequential"},
    "dataloader_drop_last": {"dataloader_drop_last": True},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "ignore_data_skip": {"ignore_data_skip": True},
    "max_length": {"max_length": 512},
    "full_determinism": {"full_determinism": True},
    "dtype of the weights": {"model_init_kwargs": {"dtype": "bfloat16"}},
    "config.rms_norm_eps": {"model_init_kwargs": {"rms_norm_eps": 1e-3}},
    "tokenizer.pad_token": lambda model: other_tokenizer(model, lambda it: setattr(it, "pad_token", it.bos_token)),
    "tokenizer.chat_template": lambda model: other_tokenizer(model, set_template),
    "the adapters was none and is default": lambda _: lora(),
    "optimizer.betas": lambda _: {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"betas": (0.5, 0.9)})},
    "Signed": lambda _: {"optimizer_cls_and_kwargs": (Signed, {})},
}


@pytest.mark.parametrize("name", CHANGED)
def test_auto_stops_for_another_run(name: str, first: Any, model_folder: str, tmp_path: Path) -> None:
    change, folder = CHANGED[name], first(tmp_path / "run")
    settings, arguments = ({}, change(model_folder)) if callable(change) else (change, None)
    with pytest.raises(UserError, match=name):
        make(model_folder, folder, arguments, resume_from_checkpoint="auto", **settings).train()


def test_auto_goes_on_with_other_logs_saves_and_workers(
    first: Any, model_folder: str, tmp_path: Path, caplog: Any
) -> None:
    others: dict[str, Any] = {"logging_steps": 1, "run_name": "b", "save_total_limit": 1, "dataloader_num_workers": 1}
    others |= {"gradient_checkpointing": False, "per_device_eval_batch_size": 3, "max_shapes": 2, "log_level": "error"}
    whole = make(model_folder, tmp_path / "whole")
    whole.train()
    resumed = make(model_folder, first(tmp_path / "run"), resume_from_checkpoint="auto", **others)
    resumed.train()
    assert resumed.state.global_step == 4 and "other settings" not in caplog.text
    assert torch.equal(whole.model.score.weight, resumed.model.score.weight)


IA3 = IA3Config(task_type="SEQ_CLS", target_modules=["q_proj"], feedforward_modules=[])
#: Changes of adapters after which the saved weights would mean something else.
OTHER_ADAPTERS: dict[str, Callable[[], dict[str, Any]]] = {
    "lora_alpha": lambda: lora(lora_alpha=64),
    "use_rslora": lambda: lora(use_rslora=True),
    "adapters default.r ": lambda: lora(r=8, lora_alpha=32),
    "peft_type": lambda: {"peft_config": IA3},
    "alpha_pattern": lambda: lora(alpha_pattern={"q_proj": 2}),
}


@pytest.mark.parametrize("resume", ["auto", True])
@pytest.mark.parametrize("name", OTHER_ADAPTERS)
def test_other_adapters_are_rejected(name: str, resume: Any, first: Any, model_folder: str, tmp_path: Path) -> None:
    folder = first(tmp_path / "run", has_adapters=True)
    with pytest.raises(UserError, match=name):
        make(model_folder, folder, OTHER_ADAPTERS[name]()).train(resume_from_checkpoint=resume)


def test_adapters_are_rejected_on_another_base_of_the_same_name(first: Any, model_folder: str, tmp_path: Path) -> None:
    other = Path(shutil.copytree(model_folder, tmp_path / Path(model_folder).name))
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    weights[name][0, 0] += 0.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    folder = first(tmp_path / "run", has_adapters=True)
    with pytest.raises(UserError, match="base model"):
        make(str(other), folder, lora()).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", ["target_modules", "modules_to_save"])
def test_other_adapted_modules_stop_auto_by_name(name: str, first: Any, model_folder: str, tmp_path: Path) -> None:
    changed = lora(**{name: ["q_proj", "v_proj"] if name == "target_modules" else ["embed_tokens"]})
    with pytest.raises(UserError, match=rf"{name} was .* and is \['(q_proj|embed_tokens|classifier)"):
        make(model_folder, first(tmp_path / "run", has_adapters=True), changed, resume_from_checkpoint="auto").train()


def test_other_dropout_stops_auto_and_else_warns(first: Any, model_folder: str, tmp_path: Path, caplog: Any) -> None:
    folder = first(tmp_path / "run", has_adapters=True)
    changed = lora(lora_dropout=0.1)
    with pytest.raises(UserError, match="lora_dropout"):
        make(model_folder, folder, changed, resume_from_checkpoint="auto", disable_dropout=False).train()
    make(model_folder, folder, changed).train(resume_from_checkpoint=True)
    assert "lora_dropout was 0.0 and is 0.1" in caplog.text


def test_adapters_of_trl_with_another_scale_are_rejected(model_folder: str, tmp_path: Path) -> None:
    args = trl.RewardConfig(str(tmp_path / "trl"), max_steps=1, save_steps=1, use_cpu=True, **QUIET)
    trl.RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(8), **lora()).train()
    with pytest.raises(UserError, match="lora_alpha"):
        trainer = make(model_folder, tmp_path / "ours", lora(lora_alpha=64))
        trainer.train(resume_from_checkpoint=str(tmp_path / "trl" / "checkpoint-1"))
