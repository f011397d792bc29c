"""A model customized by the user trains with its changes, in padded rows, and every loss equals TRL's.

The tolerance is 1e-5 on losses of about 0.7: float32 sums have another order over three steps of Adam.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import customized_models as customized
import peft
import pytest
import torch
import trl
from customized_models import losses
from transformers import LlamaModel

import trl_tpu
from trl_tpu.modeling.packability import reads_padding

CASES: dict[Callable[[], Any], str] = {
    customized.averaging: "Averaging",
    customized.replaced_forward: "LlamaForSequenceClassification",
    customized.deep_head: "Sequential",
    customized.normalized_head: "Head",
    customized.prompt_tuning: "PROMPT_TUNING",
    customized.prefix_tuning: "PREFIX_TUNING",
    customized.longrope: "max_length",
    customized.dynamic_rope: "max_length",
    customized.alibi: "BloomForSequenceClassification",
}


@pytest.mark.parametrize("make", CASES)
def test_customized_model_trains_with_trls_losses(make: Callable[[], Any], tmp_path: Path) -> None:
    if make is customized.prefix_tuning and "past_key_values" not in inspect.signature(LlamaModel.forward).parameters:
        pytest.skip("peft looks for past_key_values, which transformers 5.24 calls cache")
    trainer, ours = losses(trl_tpu, make(), tmp_path)
    assert trainer.batch_plan.padding_reason is not None
    _, reference = losses(trl, make(), tmp_path)
    assert ours == pytest.approx(reference, abs=1e-5)
    with pytest.raises(ValueError, match=f"packing.*{CASES[make]}"):
        losses(trl_tpu, make(), tmp_path, packing=True)
    assert reads_padding(make(), customized.TOKENIZER.pad_token_id) == (make in customized.READ_PADDING)


def custom_loss(trainer: Any) -> None:
    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        chosen, rejected = model(inputs["input_ids"], inputs["attention_mask"]).logits.squeeze(-1).chunk(2)
        loss = torch.relu(1 - chosen + rejected).mean()
        return (loss, {}) if return_outputs else loss

    trainer.compute_loss = compute_loss


def collator(trainer: Any) -> None:
    inner = trainer.data_collator

    def first_swapped(examples: list[dict[str, Any]]) -> dict[str, Any]:
        one = examples[0]
        return inner([one | {"chosen_ids": one["rejected_ids"], "rejected_ids": one["chosen_ids"]}, *examples[1:]])

    trainer.data_collator = first_swapped


@pytest.mark.parametrize("change", [custom_loss, collator])
def test_changes_after_construction_take_effect(change: Callable[[Any], None], tmp_path: Path) -> None:
    trainer, ours = losses(trl_tpu, customized.plain(), tmp_path, change)
    assert trainer.batch_plan.padding_reason is not None
    evaluated = trainer.evaluate(trainer.train_dataset)
    for name, logs in {"num_tokens": trainer.state.log_history[0], "eval_num_tokens": evaluated}.items():
        assert (name in logs) == (change is collator), "custom losses count no tokens"
    _, reference = losses(trl, customized.plain(), tmp_path, change)
    _, unchanged = losses(trl, customized.plain(), tmp_path)
    assert ours == pytest.approx(reference, abs=1e-5)
    assert ours != pytest.approx(unchanged, abs=1e-5)


SINGLE_TOKEN_ADAPTERS = [
    peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], use_dora=True),
    peft.IA3Config(task_type="SEQ_CLS", target_modules=["k_proj"], feedforward_modules=[]),
    peft.LNTuningConfig(task_type="SEQ_CLS", target_modules=["input_layernorm"]),
]


@pytest.mark.parametrize("config", SINGLE_TOKEN_ADAPTERS, ids=lambda config: config.peft_type.value)
def test_adapters_that_act_on_single_tokens_stay_packed(config: Any, tmp_path: Path) -> None:
    packed, ours = losses(trl_tpu, customized.adapted(config), tmp_path)
    assert packed.batch_plan.padding_reason is None
    _, padded = losses(trl_tpu, customized.adapted(config), tmp_path, packing=False)
    assert ours == pytest.approx(padded, abs=1e-5)
