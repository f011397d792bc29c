"""Saving, copying and resuming a model on XLA, during and after training, give the same as in plain torch."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import tiny
import torch
import transformers.trainer
from peft import LoraConfig
from safetensors.torch import load_file
from torch.utils.data import DataLoader, RandomSampler
from training import QUIET, STEPS, At, logged, losses, make_trainer, sigterm, trained
from transformers import AutoModelForSequenceClassification, TrainerCallback

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.state_dict import to_host
from trl_tpu.data.trl_dict import DataCollatorForPreference
from trl_tpu.errors import UserError
from trl_tpu.modeling.load import load_model
from trl_tpu.training.stopping import Unfinished

LORA = LoraConfig(task_type="SEQ_CLS", r=2, target_modules="all-linear")


class SavingCallback(TrainerCallback):
    """A common kind of callback: saves the model at every checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.save_pretrained(self.folder / f"step-{state.global_step}")


@pytest.fixture(scope="module", params=[None, LORA], ids=["full", "lora"])
def run(request: Any, model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[RewardTrainer, Path]:
    from trl_tpu import RewardConfig, runtime

    folder = tmp_path_factory.mktemp("trained")
    size = 8 // runtime.current().topology().devices
    settings = QUIET | {"max_steps": 2, "save_steps": 1, "max_shapes": 1}
    args = RewardConfig(str(folder / "out"), per_device_train_batch_size=size, **settings)
    more = {"peft_config": request.param, "callbacks": [SavingCallback(folder)]}
    trainer = trained(RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(16), **more))
    trainer.save_model(str(folder / "saved"))
    return trainer, folder


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.eight
def test_save_pretrained_equals_the_trainers_save(run: tuple[RewardTrainer, Path]) -> None:
    trainer, folder = run
    is_lora = trainer.model.__class__.__name__.startswith("Peft")
    name = "adapter_model.safetensors" if is_lora else "model.safetensors"
    trainer.model.save_pretrained(folder / "by hand")
    saved = load_file(folder / "saved" / name)
    for way in ("by hand", "step-2"):
        assert_same(load_file(folder / way / name), saved)
    assert_same(copy.deepcopy(trainer.model).to("cpu").state_dict(), trainer.model.state_dict())
    earlier = load_file(folder / "step-1" / name)
    assert not all(earlier[each].equal(saved[each]) for each in saved)


def test_optimizer_created_too_early_is_rejected_with_the_fix(model_folder: str, config: Any) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    with pytest.raises(UserError, match="optimizer_cls_and_kwargs"):
        RewardTrainer(model, config(), train_dataset=tiny.made_up_pairs(8), optimizers=optimizers)


TRL = """
import json, sys, tiny, trl
model, out = sys.argv[1:]
settings = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 8, "bf16": False}
settings |= {"learning_rate": 1e-3, "use_cpu": True, "report_to": "none"}
trainer = trl.RewardTrainer(model, trl.RewardConfig(out, **settings), train_dataset=tiny.made_up_pairs(40))
trainer.train()
"""


def test_trl_checkpoint_is_resumed(model_folder: str, config: Any, tmp_path: Path) -> None:
    """Losses equal TRL's within 1e-5: float32 sums have another order over two steps of Adam."""
    subprocesses.run("-c", TRL, model_folder, str(tmp_path / "trl"), USE_TORCH_XLA="0")
    expected = json.loads((tmp_path / "trl" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    args = config(max_steps=4, logging_steps=1)
    trainer = RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(40))
    trainer.train(resume_from_checkpoint=str(tmp_path / "trl" / "checkpoint-2"))
    found = losses(trainer)
    assert len(found) == 4
    assert found == pytest.approx([log["loss"] for log in expected], abs=1e-5)


@pytest.mark.parametrize("peft", [None, LORA], ids=["model", "adapter"])
def test_saved_model_gives_the_same_rewards(config: Any, model_folder: str, tmp_path: Path, peft: Any) -> None:
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


def test_run_stopped_in_an_evaluation_resumes_without_it(model_folder: str, tmp_path: Path) -> None:
    """The run is stopped twice: in the evaluation after step 2, and at the last step."""
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "optim_state_dtype": "bfloat16"}
    whole = trained(make_trainer(model_folder, tmp_path / "whole", **settings))
    for event, step in (("on_prediction_step", 2), ("on_step_begin", STEPS - 1)):
        stopped = make_trainer(model_folder, tmp_path / "stopped", At(event, step, sigterm), **settings)
        with pytest.raises(Unfinished):
            stopped.train(resume_from_checkpoint=True if step > 2 else None)
    resumed = trained(make_trainer(model_folder, tmp_path / "stopped", **settings), resume=True)
    left_out = {2, STEPS}
    assert logged(resumed) == [log for log in logged(whole) if "eval_loss" not in log or log["step"] not in left_out]


# ---- the data loader


def test_error_in_a_batch_stops_training(config: Any, model_folder: str) -> None:
    class FailingCollator(DataCollatorForPreference):
        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            raise RuntimeError("row 7 cannot be read")

    trainer = RewardTrainer(model_folder, config(max_steps=3), FailingCollator(0), tiny.made_up_pairs(32))
    with pytest.raises(RuntimeError, match="row 7"):
        trainer.train()


def test_device_map_is_ignored(model_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(model_folder, device_map="auto")
    assert not hasattr(model, "hf_device_map") and "`device_map` is ignored" in caplog.text


class OwnLoader(RewardTrainer):
    """Builds its own loader of torch's class."""

    def get_train_dataloader(self) -> DataLoader:
        size = self.args.train_batch_size
        return DataLoader(self.train_dataset, size, collate_fn=self.data_collator)  # type: ignore[arg-type]


class PreparedLoader(RewardTrainer):
    """Builds its loader through accelerate, as transformers does, without a sampler."""

    def get_train_dataloader(self) -> DataLoader:
        pairs, size = len(self.train_dataset), self.args.train_batch_size  # type: ignore[arg-type]
        batches: Any = [[*range(first, first + size)] for first in range(0, pairs, size)]
        loader = DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)  # type: ignore[arg-type]
        return self.accelerator.prepare(loader)


@pytest.mark.eight
@pytest.mark.parametrize("kind", [RewardTrainer, OwnLoader, PreparedLoader])
def test_resume_within_an_epoch_has_the_same_losses(kind: Any, config: Any, model_folder: str, tmp_path: Path) -> None:
    theirs = transformers.trainer.skip_first_batches
    settings: dict[str, Any] = {"num_train_epochs": 1, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
    if kind is not RewardTrainer:  # their loaders plan no shapes: pad to one length for a single program
        settings |= {"packing": False, "pad_to_multiple_of": 64}

    def of_epoch(resume: str | None = None) -> list[float]:
        trainer = kind(model_folder, config(**settings), train_dataset=tiny.made_up_pairs(32))
        trainer.train(resume_from_checkpoint=resume)
        return losses(trainer)

    whole = of_epoch()
    assert len(whole) == 4
    assert of_epoch(str(tmp_path / "checkpoint-2")) == pytest.approx(whole, rel=1e-6)
    assert transformers.trainer.skip_first_batches is theirs


def test_torch_sampler_is_used_on_request(config: Any, model_folder: str) -> None:
    args = config(accelerator_config={"use_seedable_sampler": False})
    trainer = RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(8))
    assert type(trainer.get_train_dataloader().batch_sampler.sampler) is RandomSampler
