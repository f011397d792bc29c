"""What a user changed in the model is what trains: rows are padded then, and every loss is TRL's with the same model.

Tolerance 1e-5 on losses around 0.7: float32 sums in another order over three steps of Adam.
"""

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import peft
import pytest
import tiny
import torch
import trl
from torch import nn
from transformers import LlamaForSequenceClassification, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

import trl_tpu

PAIRS = tiny.made_up_pairs(40)
TOKENIZER = tiny.tiny_tokenizer([*PAIRS["prompt"], *PAIRS["chosen"], *PAIRS["rejected"]], vocab_size=300)


def plain() -> LlamaForSequenceClassification:
    return tiny.tiny_model(TOKENIZER)


class Averaging(LlamaForSequenceClassification):
    """Averages the scores of all tokens."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        kwargs.pop("use_cache", None)
        states_RLH = self.model(input_ids, attention_mask, **kwargs).last_hidden_state
        scores_RL = self.score(states_RLH).squeeze(-1) * attention_mask
        means_R = scores_RL.sum(1) / attention_mask.sum(1)
        return SequenceClassifierOutput(logits=means_R[:, None])  # type: ignore[arg-type]


class Bounded(LlamaForSequenceClassification):
    """Takes what transformers does, and bounds the reward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        output.logits = 3 * torch.tanh(output.logits)
        return output


def averaging() -> PreTrainedModel:
    return _as(Averaging)


def bounded() -> PreTrainedModel:
    return _as(Bounded)


def _as(model_class: Any) -> PreTrainedModel:
    stock = plain()
    model = model_class(stock.config)
    model.load_state_dict(stock.state_dict())
    return model


def replaced_forward() -> PreTrainedModel:
    model = plain()
    forward = model.forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output: Any = forward(*args, **kwargs)
        output.logits = 2 * output.logits + 1
        return output

    model.forward = MethodType(doubled, model)  # type: ignore[method-assign]
    return model


def hooked_output() -> PreTrainedModel:
    model = plain()

    def halved(_module: Any, _args: Any, output: Any) -> Any:
        output.logits = output.logits / 2
        return output

    model.register_forward_hook(halved)
    return model


def hooked_states() -> PreTrainedModel:
    """Subtracts each row's mean state."""
    model = plain()
    model.score.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(1, keepdim=True),))
    return model


def deep_head() -> PreTrainedModel:
    model = plain()
    torch.manual_seed(1)
    model.score = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))  # type: ignore[assignment]
    return model


def normalized_head() -> PreTrainedModel:
    """Its dropout and norm see hidden states of whole rows."""

    class Head(nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return super().forward(states / states.std(dim=1, keepdim=True).clamp(min=1e-3))

    model = plain()
    head = Head(32, 1, bias=False)
    head.load_state_dict(model.score.state_dict())
    model.score = head
    return model


def prompt_tuning() -> Any:
    return _adapted(peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4))


def p_tuning() -> Any:
    return _adapted(peft.PromptEncoderConfig(task_type="SEQ_CLS", num_virtual_tokens=4, encoder_hidden_size=16))


def prefix_tuning() -> Any:
    return _adapted(peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4))


def _adapted(config: Any) -> Any:
    model = plain()
    torch.manual_seed(2)
    return peft.get_peft_model(model, config)


CASES: dict[Callable[[], Any], str] = {
    averaging: "the forward of Averaging is not a library's own",
    bounded: "the forward of Bounded is not a library's own",
    replaced_forward: "the forward of LlamaForSequenceClassification is not a library's own",
    hooked_output: "LlamaForSequenceClassification has a forward hook of yours",
    hooked_states: r"Linear \(score\) has a forward hook of yours",
    deep_head: "the `score` head is a Sequential instead of a linear layer",
    normalized_head: r"the forward of Head \(score\) is not a library's own",
    prompt_tuning: "adapters of the kind PROMPT_TUNING",
    p_tuning: "adapters of the kind P_TUNING",
    prefix_tuning: "adapters of the kind PREFIX_TUNING",
}
SETTINGS: dict[str, Any] = {
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "max_steps": 3,
    "bf16": False,
    "learning_rate": 1e-3,
    "gradient_checkpointing": False,
}


def losses(
    package: Any, model: Any, folder: Path, prepare: Callable[[Any], None] = lambda _: None, **more: Any
) -> Any:
    own = {"use_cpu": True, "optim": "adamw_torch"} if package is trl else {}
    args = package.RewardConfig(str(folder), **SETTINGS | own | more)
    trainer = package.RewardTrainer(model, args, train_dataset=PAIRS, processing_class=TOKENIZER)
    prepare(trainer)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("make", CASES)
def test_the_users_model_is_what_trains(make: Callable[[], Any], tmp_path: Path) -> None:
    trainer, ours = losses(trl_tpu, make(), tmp_path)
    assert trainer.batch_plan.padded_because is not None
    _, reference = losses(trl, make(), tmp_path)
    assert ours == pytest.approx(reference, abs=1e-5)
    with pytest.raises(ValueError, match=f"packing=True is impossible: {CASES[make]}"):
        losses(trl_tpu, make(), tmp_path, packing=True)


def test_a_forward_of_the_class_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = LlamaForSequenceClassification.forward

    def negated(self: Any, *args: Any, **kwargs: Any) -> Any:
        output: Any = stock(self, *args, **kwargs)
        output.logits = 1 - output.logits
        return output

    monkeypatch.setattr(LlamaForSequenceClassification, "forward", negated)
    _, ours = losses(trl_tpu, plain(), tmp_path)
    _, reference = losses(trl, plain(), tmp_path)
    assert ours == pytest.approx(reference, abs=1e-5)


def tripled_rewards(trainer: Any) -> None:
    forward = trainer.model.forward

    def tripled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = 3 * output.logits
        return output

    trainer.model.forward = tripled


def hook(trainer: Any) -> None:
    trainer.model.score.register_forward_hook(lambda _module, _args, output: output + output.mean(1, keepdim=True))


def loss_of_its_own(trainer: Any) -> None:
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


@pytest.mark.parametrize("change", [tripled_rewards, hook, loss_of_its_own, collator])
def test_what_is_changed_after_construction_holds(change: Callable[[Any], None], tmp_path: Path) -> None:
    trainer, ours = losses(trl_tpu, plain(), tmp_path, change)
    assert trainer.batch_plan.padded_because is not None
    _, reference = losses(trl, plain(), tmp_path, change)
    _, unchanged = losses(trl, plain(), tmp_path)
    assert ours == pytest.approx(reference, abs=1e-5)
    assert ours != pytest.approx(unchanged, abs=1e-5)


def test_noise_of_neftune_is_scaled_by_dialogues(tmp_path: Path) -> None:
    trainer, _ = losses(trl_tpu, plain(), tmp_path, neftune_noise_alpha=5.0)
    assert "neftune_noise_alpha" in trainer.batch_plan.padded_because


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], use_dora=True),
        peft.IA3Config(task_type="SEQ_CLS", target_modules=["k_proj"], feedforward_modules=[]),
        peft.LNTuningConfig(task_type="SEQ_CLS", target_modules=["input_layernorm"]),
        peft.OFTConfig(task_type="SEQ_CLS", target_modules=["q_proj"], oft_block_size=0, r=2),
        peft.VeraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], r=4),
        peft.LoHaConfig(task_type="SEQ_CLS", target_modules=["q_proj"], r=2),
        peft.LoKrConfig(task_type="SEQ_CLS", target_modules=["q_proj"], r=2),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_adapters_that_change_each_token_by_itself_stay_packed(config: Any, tmp_path: Path) -> None:
    packed, ours = losses(trl_tpu, _adapted(config), tmp_path)
    assert packed.batch_plan.padded_because is None
    _, padded = losses(trl_tpu, _adapted(config), tmp_path, packing=False)
    assert ours == pytest.approx(padded, abs=1e-5)
