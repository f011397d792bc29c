"""The data loader for XLA devices."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import transformers.trainer
from torch.utils.data import DataLoader, RandomSampler
from training import losses

from trl_tpu import RewardTrainer
from trl_tpu.data.trl_dict import DataCollatorForPreference
from trl_tpu.errors import UserError
from trl_tpu.modeling.load import load_model


def test_error_in_a_batch_stops_training(config: Any, model_folder: str) -> None:
    class FailingCollator(DataCollatorForPreference):
        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            raise RuntimeError("row 7 cannot be read")

    trainer = RewardTrainer(model_folder, config(max_steps=3), FailingCollator(0), tiny.made_up_pairs(32))
    with pytest.raises(RuntimeError, match="row 7"):
        trainer.train()


def test_device_map_is_ignored_and_bitsandbytes_rejected(model_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(model_folder, device_map="auto")
    assert not hasattr(model, "hf_device_map") and "`device_map` is ignored" in caplog.text
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(UserError, match="bitsandbytes"):
        load_model(model_folder, quantization_config=quantization)


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
