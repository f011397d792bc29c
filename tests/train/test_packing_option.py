"""Batches are packed wherever that is exact; elsewhere they are padded, with the reason, or refused on request."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import transformers
import trl
from training import losses
from transformers import PreTrainedModel, PreTrainedTokenizerFast, set_seed

import trl_tpu
from trl_tpu import RewardConfig, RewardTrainer


def make_trainer(model: PreTrainedModel, tokenizer: Any, out: Path, packing: Any) -> RewardTrainer:
    settings = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 2}
    args = RewardConfig(str(out), packing=packing, gradient_checkpointing=False, **settings)
    return RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(20), processing_class=tokenizer)


def is_packed(trainer: RewardTrainer) -> bool:
    return next(iter(trainer.get_train_dataloader())).parts[0].is_packed


def size(tokenizer: PreTrainedTokenizerFast, **more: Any) -> dict[str, Any]:
    shape = {"vocab_size": len(tokenizer) + 50, "hidden_size": 32, "num_labels": 1}
    return shape | {"pad_token_id": tokenizer.pad_token_id} | more


def bloom(tokenizer: Any) -> PreTrainedModel:
    """It counts its ALiBi positions in the row: packed rewards would be silently wrong."""
    return transformers.BloomForSequenceClassification(
        transformers.BloomConfig(**size(tokenizer, n_layer=2, n_head=4))
    )


def bert(tokenizer: Any) -> PreTrainedModel:
    more = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**size(tokenizer, **more)))


def linear_attention(tokenizer: Any) -> PreTrainedModel:
    """Jamba mixes attention with recurrent layers, whose state runs along the row."""
    more = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    more |= {f"{kind}_layer_{what}": of for kind in ("attn", "expert") for what, of in (("period", 2), ("offset", 1))}
    more |= {"num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 4, "use_mamba_kernels": False}
    return transformers.JambaForSequenceClassification(transformers.JambaConfig(**size(tokenizer, **more)))


MODELS: dict[Callable[[Any], PreTrainedModel], str] = {
    bloom: "BloomForSequenceClassification",
    bert: "BertForSequenceClassification",
    linear_attention: "JambaForSequenceClassification",
}


@pytest.mark.parametrize("make", MODELS)
def test_models_for_which_packing_is_not_exact(
    make: Callable[[Any], PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They train on padded rows, as with packing=False, and the reason is given once."""

    def of_training(packing: Any) -> list[float]:
        set_seed(0)
        trainer = make_trainer(make(tokenizer), tokenizer, tmp_path, packing)
        assert not is_packed(trainer)
        trainer.train()
        return losses(trainer)

    with caplog.at_level(logging.WARNING):
        automatic = of_training("auto")
    assert sum(MODELS[make] in each.getMessage() for each in caplog.records if each.name.startswith("trl_tpu")) == 1
    assert automatic == of_training(False)
    set_seed(0)
    with pytest.raises(ValueError, match=f"packing.*{MODELS[make]}"):
        make_trainer(make(tokenizer), tokenizer, tmp_path, packing=True)


@pytest.mark.parametrize("counted", ["all", "non_padding"])
def test_input_tokens_are_counted_as_trl_counts_them(
    counted: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    seen = []
    for library in (trl, trl_tpu):
        settings = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "max_steps": 3}
        args = library.RewardConfig(
            str(tmp_path), include_num_input_tokens_seen=counted, bf16=False, use_cpu=True, **settings
        )
        data = {"train_dataset": tiny.made_up_pairs(10), "processing_class": tokenizer}
        trainer = library.RewardTrainer(tiny.tiny_model(tokenizer), args, **data)
        trainer.train()
        seen.append(trainer.state.num_input_tokens_seen)
    assert seen[1] == seen[0] > 0
