"""RewardConfig(packing=True): exact, or refused before training."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.trainer.reward_trainer import DataCollatorForPreference


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    pairs = tiny.made_up_pairs(50)
    return tiny.tiny_tokenizer([*pairs["prompt"], *pairs["chosen"], *pairs["rejected"]], vocab_size=300)


def make_trainer(model: PreTrainedModel, tokenizer: Any, out: Path, **arguments: Any) -> RewardTrainer:
    trainer_class = arguments.pop("trainer_class", RewardTrainer)
    args = RewardConfig(str(out), packing=True, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=2)
    arguments.setdefault("train_dataset", tiny.made_up_pairs(20))
    return trainer_class(model, args, processing_class=tokenizer, **arguments)


def test_predictions_equal_those_of_padded_rows(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trainer = make_trainer(tiny.tiny_model(tokenizer), tokenizer, tmp_path)
    trainer.train()
    held_out = tiny.made_up_pairs(13, seed=1)
    packed = trainer.evaluate(held_out)
    trainer.args.packing = False
    padded = trainer.evaluate(held_out)
    for name in ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward"):
        assert packed[f"eval_{name}"] == pytest.approx(padded[f"eval_{name}"], abs=1e-5), name


def size(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {"vocab_size": len(tokenizer), "hidden_size": 32, "num_labels": 1, "pad_token_id": tokenizer.pad_token_id}


def test_a_model_that_reads_positions_from_elsewhere_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Bloom takes any mask, and counts its ALiBi positions in the row: packed rewards would be silently wrong."""
    set_seed(0)
    model = BloomForSequenceClassification(BloomConfig(**size(tokenizer), n_layer=2, n_head=4))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with pytest.raises(ValueError, match="packing=True is not exact for BloomForSequenceClassification"):
        make_trainer(model, tokenizer, tmp_path)


def test_an_encoder_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    config = BertConfig(**size(tokenizer), num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(ValueError, match="has no `score` head"):
        make_trainer(BertForSequenceClassification(config), tokenizer, tmp_path)


class OwnLoss(RewardTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def stream() -> Any:
    return Dataset.to_iterable_dataset(tiny.made_up_pairs(20))


@pytest.mark.parametrize(
    ("arguments", "obstacle"),
    [
        ({"train_dataset": stream}, "a stream"),
        ({"data_collator": lambda: DataCollatorForPreference(0)}, "a data collator of your own"),
        ({"trainer_class": lambda: OwnLoss}, "overrides compute_loss"),
    ],
)
def test_what_packing_cannot_go_with(
    arguments: dict[str, Any], obstacle: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    made = {name: make() for name, make in arguments.items()}
    with pytest.raises(ValueError, match=rf"packing=True cannot go with .*{obstacle}"):
        make_trainer(tiny.tiny_model(tokenizer), tokenizer, tmp_path, **made)
