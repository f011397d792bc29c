"""Checkpoints are complete or invisible, damaged ones are named and skipped, and no file in them runs code.

`resume_from_checkpoint="auto"` stops for another run, and adapters load only into the same adapters.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import killed_runs
import pytest
import tiny
import torch
import trl
from checkpoints import write_checkpoint
from fake_hosts import SingleHost
from peft import IA3Config, LoraConfig
from safetensors.torch import load_file, save_file
from training import QUIET
from transformers import AutoTokenizer

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.checkpoint.checkpointer import CheckpointLoader
from trl_tpu.checkpoint.folders import MANIFEST_FILE, RunFolder, find_faults
from trl_tpu.checkpoint.state_dict import PROGRESS_FILE
from trl_tpu.errors import UserError
from trl_tpu.runtime.native import Runtime


def found(output_dir: Path, asked: str | bool = True) -> str | None:
    loader = CheckpointLoader(Runtime(), SingleHost(), shares_disk=True)
    return loader.find(asked, RunFolder(output_dir, None, writes=True), "packed", {"seed": 7})


def newer_format(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest | {"format": 99}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda folder: os.truncate(folder / "weights", 50), "weights"),
    "altered": (lambda folder: (folder / "weights").write_bytes(bytes(100)), "weights"),
    "removed": (lambda folder: (folder / "inner" / "state.json").unlink(), "inner/state.json"),
    "torn manifest": (lambda folder: os.truncate(folder / MANIFEST_FILE, 20), "manifest.json"),
    "no manifest": (lambda folder: (folder / MANIFEST_FILE).unlink(), "manifest.json"),
    "newer format": (newer_format, "format 99"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoint_is_named_and_skipped(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 9, 10):
        write_checkpoint(tmp_path, step)
    damage, fault = DAMAGES[name]
    damage(tmp_path / "checkpoint-10")
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path) == str(tmp_path / "checkpoint-9")  # numeric order: 9 comes before 10
    assert "checkpoint-10" in caplog.text and fault in caplog.text
    assert find_faults(tmp_path / "checkpoint-2") == []


@pytest.mark.parametrize(
    "name",
    ["/dev/zero", "../outside", "inner/../../outside", "link", "loop", "a\0b", "linked/outside"],
)
def test_only_files_of_the_folder_are_read(name: str, tmp_path: Path) -> None:
    """A manifest may name endless devices or files outside the checkpoint."""
    folder = write_checkpoint(tmp_path, 1)
    (tmp_path / "outside").write_bytes(b"")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["files"] = {name: {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    (fault,) = find_faults(folder)
    assert repr(name) in fault and "\n" not in fault


def test_links_within_a_checkpoint_are_followed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 1)
    (folder / "weights").rename(folder / "moved")
    (folder / "weights").symlink_to("moved")
    (tmp_path / "latest").symlink_to(folder)
    assert find_faults(tmp_path / "latest") == []


def test_error_without_a_good_checkpoint_names_the_damaged_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="resume_from_checkpoint"):
        found(tmp_path)
    os.truncate(write_checkpoint(tmp_path, 4) / "weights", 50)
    for asked in (True, str(tmp_path / "checkpoint-4")):
        with pytest.raises(UserError, match="checkpoint-4.*weights"):
            found(tmp_path, asked)


def test_auto_resumes_the_newest_checkpoint_starts_or_raises(tmp_path: Path) -> None:
    assert found(tmp_path, "auto") is None
    write_checkpoint(tmp_path / "_unfinished", 9)  # left by a killed save
    assert found(tmp_path, "auto") is None
    shutil.rmtree(tmp_path / "_unfinished")
    for step, seed in ((2, 7), (4, 7), (6, 8)):
        progress = json.dumps({"batches": "packed", "order": {"seed": seed}})
        (write_checkpoint(tmp_path, step) / PROGRESS_FILE).write_text(progress)
        if seed == 7:
            assert found(tmp_path, "auto") == str(tmp_path / f"checkpoint-{step}")
    with pytest.raises(UserError, match="checkpoint-6.*seed was 8 and is 7"):
        found(tmp_path, "auto")
    os.truncate(tmp_path / "checkpoint-6" / "weights", 50)
    write_checkpoint(tmp_path, 8)  # without a record of its run
    for newest in ("checkpoint-8", "checkpoint-6"):
        with pytest.raises(UserError, match=newest):
            found(tmp_path, "auto")
        shutil.rmtree(tmp_path / newest)
    run = RunFolder(tmp_path, None, writes=True)
    run.begin(str(tmp_path / "checkpoint-2"), step=2)
    shutil.rmtree(tmp_path / "checkpoint-2")
    run.claim()
    with pytest.raises(UserError, match="output_dir"):  # the checkpoint it was resumed from is missing
        CheckpointLoader(Runtime(), SingleHost(), shares_disk=True).find("auto", run, "packed", {})
    run.release()


@pytest.mark.parametrize("kills", [5, pytest.param(40, marks=pytest.mark.long)])
def test_killed_runs_resume_bitwise(kills: int, tmp_path: Path) -> None:
    """Weights, moments and logs are equal after kills at random times and during saves."""
    report = killed_runs.report(tmp_path, kills, {"USE_TORCH_XLA": "0"})
    assert report["kills"] >= kills and report["saves_hit"] >= kills // 5 and report["resumes"] >= kills // 2, report


# ---- the identity of a run


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


def test_auto_goes_on_with_other_logs_and_workers(first: Any, model_folder: str, tmp_path: Path, caplog: Any) -> None:
    others: dict[str, Any] = {"logging_steps": 1, "run_name": "b", "save_total_limit": 1, "dataloader_num_workers": 1}
    others |= {"gradient_checkpointing": False, "per_device_eval_batch_size": 3, "max_shapes": 2, "log_level": "error"}
    whole = make(model_folder, tmp_path / "whole")
    whole.train()
    resumed = make(model_folder, first(tmp_path / "run"), resume_from_checkpoint="auto", **others)
    resumed.train()
    assert resumed.state.global_step == 4 and "other settings" not in caplog.text
    assert torch.equal(whole.model.score.weight, resumed.model.score.weight)


def test_auto_goes_on_with_another_kernel_of_the_optimizer(model_folder: str, tmp_path: Path, caplog: Any) -> None:
    whole = make(model_folder, tmp_path / "run", optim="adamw_torch")
    whole.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    resumed = make(model_folder, tmp_path / "run", resume_from_checkpoint="auto")
    resumed.train()
    assert resumed.args.optim == "adamw_torch_fused" and "other settings" not in caplog.text
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


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
