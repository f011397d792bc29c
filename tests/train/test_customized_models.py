"""A model customized by the user trains with its changes, in padded rows, and every loss equals TRL's.

The tolerance is 1e-5 on losses of about 0.7: float32 sums have another order over three steps of Adam. Customized
trainers evaluate as in transformers' loop: the reference is the same subclass of TRL's trainer.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import customized_models as customized
import numpy as np
import peft
import pytest
import tiny
import torch
import trl
from customized_models import losses
from torch.nn.functional import logsigmoid
from transformers import EvalPrediction, LlamaModel

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


# ---- evaluation


PAIRS = tiny.made_up_pairs(11)
TOKENIZER = tiny.tiny_tokenizer(PAIRS)


def rewards_of(model: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    chosen_P, rejected_P = model(inputs["input_ids"], inputs["attention_mask"]).logits.squeeze(-1).chunk(2)
    return chosen_P, rejected_P


def with_loss(outputs: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[type], type]:
    """Return a subclass with a custom loss that returns the given outputs."""

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        chosen_P, rejected_P = rewards_of(model, inputs)
        loss = -logsigmoid(2 * (chosen_P - rejected_P)).mean()
        return (loss, outputs(chosen_P, rejected_P)) if return_outputs else loss

    return lambda base: type("Customized", (base,), {"compute_loss": compute_loss})


def with_predictions(returned: Callable[[Any, Any, Any], Any]) -> Callable[[type], type]:
    """Return a subclass with a custom prediction step."""

    def prediction_step(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        with torch.no_grad():
            chosen_P, rejected_P = rewards_of(model, self._prepare_inputs(inputs))
        return returned(-logsigmoid(chosen_P - rejected_P).mean(), chosen_P, rejected_P)

    return lambda base: type("Customized", (base,), {"prediction_step": prediction_step})


def labels(chosen_P: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(chosen_P)) % 3


PREDICTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "labels": lambda loss, chosen, rejected: (loss, torch.stack([chosen, rejected], 1), labels(chosen)),
    "two tensors": lambda loss, chosen, rejected: (loss, (chosen, rejected), labels(chosen)),
    "no labels": lambda loss, chosen, rejected: (loss, torch.stack([chosen, rejected], 1), None),
    "the loss only": lambda loss, chosen, rejected: (loss, None, None),
}
OUTPUTS: dict[str, Callable[[Any, Any], Any]] = {
    "other names": lambda chosen, rejected: {"rewards_j": chosen, "rewards_k": rejected},
    "logits": lambda chosen, rejected: {"logits": torch.cat([chosen, rejected])[:, None]},
    "one tensor": lambda chosen, rejected: {"margins": chosen - rejected},
}


def with_probabilities(base: type) -> type:
    """Return a subclass with the prediction step of TRL up to 0.23, adapted to the current loss outputs."""

    class Customized(base):  # type: ignore[misc]
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            probabilities_P2 = outputs.logits.view(2, -1).softmax(dim=0).T
            return loss.detach(), probabilities_P2, torch.zeros(len(probabilities_P2))

    return Customized


def evaluate(package: Any, subclass: Callable[[type], type], folder: Path) -> tuple[dict[str, float], list[Any]]:
    """Return the metrics over 11 pairs in batches of 4, and the arguments of compute_metrics."""
    seen: list[Any] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append((prediction.predictions, prediction.label_ids))
        return {"called": 1.0}

    own = {"use_cpu": True} if package is trl else {}
    args = package.RewardConfig(str(folder), per_device_eval_batch_size=4, report_to="none", bf16=False, **own)
    torch.manual_seed(0)
    given = {"train_dataset": PAIRS, "processing_class": TOKENIZER, "compute_metrics": compute_metrics}
    trainer = subclass(package.RewardTrainer)(tiny.tiny_model(TOKENIZER), args, **given)
    return trainer.evaluate(trainer.train_dataset), seen


@pytest.mark.parametrize("name", PREDICTIONS)
def test_user_prediction_step_is_called_as_by_transformers(name: str, tmp_path: Path) -> None:
    subclass = with_predictions(PREDICTIONS[name])
    (ours, seen), (theirs, expected) = (evaluate(package, subclass, tmp_path) for package in (trl_tpu, trl))
    assert ours.get("eval_loss") == (pytest.approx(theirs["eval_loss"], abs=1e-6) if "eval_loss" in theirs else None)
    assert len(seen) == len(expected) == ("eval_called" in theirs)
    for one, other in zip(seen, expected, strict=True):
        for mine, reference in zip(one, other, strict=True):
            np.testing.assert_allclose(np.asarray(mine), np.asarray(reference), atol=1e-6)


@pytest.mark.parametrize("name", OUTPUTS)
def test_user_loss_may_return_any_outputs(name: str, tmp_path: Path) -> None:
    subclass = with_loss(OUTPUTS[name])
    (ours, seen), (theirs, _) = (evaluate(package, subclass, tmp_path) for package in (trl_tpu, trl))
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-6)
    has_rewards = name != "one tensor"
    assert ("eval_accuracy" in ours) == has_rewards == bool(seen)
    if has_rewards:
        ((rewards_N2, labels_N),) = seen
        assert rewards_N2.shape == (11, 2) and not labels_N.any()
        assert ours["eval_accuracy"] == pytest.approx((rewards_N2[:, 0] > rewards_N2[:, 1]).mean())


def test_reward_metrics_come_from_the_loss_not_the_predictions(tmp_path: Path) -> None:
    (plain, rewards), (ours, seen), (theirs, expected) = (
        evaluate(package, subclass, tmp_path)
        for package, subclass in (
            (trl_tpu, lambda base: base),
            (trl_tpu, with_probabilities),
            (trl, with_probabilities),
        )
    )
    np.testing.assert_allclose(seen[0][0], expected[0][0], atol=1e-6)
    np.testing.assert_allclose(seen[0][0], torch.tensor(rewards[0][0]).softmax(-1), atol=1e-6)
    for name in ("loss", "mean_reward", "margin", "accuracy", "min_reward", "brier"):
        assert ours[f"eval_{name}"] == pytest.approx(plain[f"eval_{name}"], abs=1e-6), name
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-6)
    unknown, _ = evaluate(trl_tpu, with_predictions(PREDICTIONS["labels"]), tmp_path)
    assert "eval_mean_reward" not in unknown and "eval_mean_reward" in plain
