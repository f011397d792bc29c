"""Customized trainers and models train and evaluate like the same customization of TRL's.

The tolerance is 1e-5 on losses of about 0.7: float32 sums have another order over three steps of Adam.
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import customized_models as customized
import hyperparameter_search
import numpy as np
import peft
import pytest
import tiny
import torch
import trl
from datasets import Dataset
from torch.nn.functional import logsigmoid
from training import losses, trained
from transformers import EvalPrediction, LlamaModel

import trl_tpu
from trl_tpu.errors import UserError
from trl_tpu.modeling.packability import reads_padding

PAIRS = tiny.made_up_pairs(24)
TOKENIZER = tiny.tiny_tokenizer(PAIRS)


def arguments(package: Any, folder: Path) -> Any:
    own = {"use_cpu": True, "optim": "adamw_torch"} if package is trl else {}
    settings: dict[str, Any] = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-3, "bf16": False, "seed": 3}
    return package.RewardConfig(str(folder), report_to="none", save_strategy="no", **settings | own)


def model() -> Any:
    torch.manual_seed(0)
    return tiny.tiny_model(TOKENIZER)


def test_token_ids_from_a_subclass_are_checked(tmp_path: Path) -> None:
    class OwnIds(trl_tpu.RewardTrainer):
        def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
            return Dataset.from_dict({"chosen_ids": [[1, 2]], "rejected_ids": [[1, 10_000]]})

    with pytest.raises(ValueError, match="Row 0 of the train dataset.*10000"):
        OwnIds(model(), arguments(trl_tpu, tmp_path), train_dataset=PAIRS, processing_class=TOKENIZER)


@pytest.mark.parametrize("form", ["texts", "messages"])
def test_trls_source_trains_with_changed_imports(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its imports exist at the same paths, and its overrides are called."""
    pasted = ModuleType("pasted")
    monkeypatch.setitem(sys.modules, "pasted", pasted)
    code = inspect.getsource(trl.trainer.reward_trainer)
    exec(code.replace("from ..", "from trl_tpu.").replace("from .", "from trl_tpu.trainer."), vars(pasted))
    data = PAIRS if form == "texts" else PAIRS.map(as_messages)
    assert issubclass(pasted.RewardTrainer, trl_tpu.RewardTrainer)
    check_equal_logs(logs(pasted.RewardTrainer, trl_tpu, data, tmp_path), logs(trl.RewardTrainer, trl, data, tmp_path))


def as_messages(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {column: [{"role": role, "content": row[column]}] for column, role in roles.items()}


def test_subclass_that_skips_the_constructor_is_rejected(tmp_path: Path) -> None:
    class Own(trl_tpu.RewardTrainer):
        def __init__(self, **settings: Any) -> None:
            assert not hasattr(self, "trl_tpu")
            super(trl_tpu.RewardTrainer, self).__init__(**settings)

    with pytest.raises(UserError, match=r"Own .*super\(\).__init__"):
        Own(model=model(), args=arguments(trl_tpu, tmp_path), train_dataset=PAIRS).train()


OVERRIDABLE = {"reads_padded_rows", "fixed_shapes", "use_reward_data_collator"}  # the last one is from TRL up to 0.23


def test_subclass_may_use_any_attribute_name(tmp_path: Path) -> None:
    """Every public name is free except those of TRL's trainer, `trl_tpu`, and documented hooks."""

    def make(kind: Any, folder: str) -> Any:
        args = arguments(trl_tpu, tmp_path / folder)
        args.save_strategy, args.save_steps, args.eval_strategy, args.eval_steps = "steps", 2, "steps", 2
        return kind(model(), args, train_dataset=PAIRS, eval_dataset=PAIRS, processing_class=TOKENIZER)

    def run(trainer: Any, **more: Any) -> list[float]:
        trainer.train(**more)
        trainer.save_model()
        return [*losses(trainer), *trainer.predict(PAIRS).predictions.ravel().tolist()]

    theirs = trl.RewardTrainer(model(), arguments(trl, tmp_path), train_dataset=PAIRS, processing_class=TOKENIZER)
    ours = make(trl_tpu.RewardTrainer, "plain")
    names = {*dir(ours), *dir(ours.trl_tpu), "throughput"} - {*dir(theirs), *OVERRIDABLE}
    names = {name for name in names if not name.startswith("_") and name != "trl_tpu"}
    assert {"runtime", "checkpoints", "verdicts", "stopped_by", "describe"} <= names

    def init(self: Any, *args: Any, **settings: Any) -> None:
        trl_tpu.RewardTrainer.__init__(self, *args, **settings)
        for name in names:
            setattr(self, name, "its own")

    own = type("Own", (trl_tpu.RewardTrainer,), dict.fromkeys(names, "its own") | {"__init__": init})
    expected = run(make(trl_tpu.RewardTrainer, "plain"))
    trainer = make(own, "own")
    assert run(trainer) == expected
    results = {"stopped_by", "stop_checkpoint"}
    assert {getattr(trainer, name) for name in names - results} == {"its own"}
    assert run(make(own, "own"), resume_from_checkpoint=True)[-len(PAIRS) :] == expected[-len(PAIRS) :]


METRICS = ("num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin")


def logs(kind: Any, package: Any, data: Dataset, folder: Path) -> list[dict[str, float]]:
    """Return the logs of three steps and of the evaluation after them."""
    trainer = trained(kind(model(), arguments(package, folder), None, data, data, TOKENIZER))
    trainer.evaluate()
    return [entry for entry in trainer.state.log_history if "train_loss" not in entry]


def check_equal_logs(ours: list[dict[str, float]], theirs: list[dict[str, float]], *own: str) -> None:
    """Compare every loss and metric, except those named in ``own``."""
    for mine, reference in zip(ours, theirs, strict=True):
        named = {name for name in reference if name.removeprefix("eval_").removeprefix("last_") in (*METRICS, "loss")}
        assert len(named) > len(METRICS)
        for name in named - {*own}:
            close = 1e-6 if name == "loss" else 1e-5
            assert mine[name] == pytest.approx(reference[name], abs=close), name


def test_subclass_may_rename_columns_and_log_derived_metrics(tmp_path: Path) -> None:
    """As in TRL, the metrics are available after super()."""

    def subclass(base: Any) -> type:
        class Own(base):
            def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
                renamed = dataset.rename_columns({"better": "chosen", "worse": "rejected"})
                return super()._prepare_dataset(renamed, processing_class, args, dataset_name)

            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                loss = super().compute_loss(model, inputs, *args, **kwargs)
                metrics = self._metrics["train" if self.model.training else "eval"]
                for name in METRICS:
                    metrics[f"last_{name}"].append(metrics[name][-1])
                return loss

        return Own

    data = PAIRS.rename_columns({"chosen": "better", "rejected": "worse"})
    ours, theirs = (logs(subclass(each.RewardTrainer), each, data, tmp_path) for each in (trl_tpu, trl))
    assert all({f"last_{name}", f"eval_last_{name}"} & reference.keys() for name in METRICS for reference in theirs)
    # exact over a log here, averages over batches in TRL
    check_equal_logs(ours, theirs, "min_reward", "max_reward", "eval_min_reward", "eval_max_reward")


@pytest.mark.parametrize("afterwards", [False, True])
def test_search_trains_trials_as_separate_runs(afterwards: bool, tmp_path: Path, monkeypatch: Any) -> None:
    found, alone = hyperparameter_search.losses(tmp_path, monkeypatch, afterwards)
    assert found == pytest.approx(alone, abs=1e-6)


# ---- models customized by the user, in padded rows


CASES: dict[Callable[[], Any], str] = {
    customized.averaging: "Averaging",
    customized.deep_head: "Sequential",
    customized.normalized_head: "Head",
    customized.prompt_tuning: "PROMPT_TUNING",
    customized.prefix_tuning: "PREFIX_TUNING",
    customized.longrope: "max_length",
    customized.dynamic_rope: "max_length",
}


@pytest.mark.parametrize("make", CASES)
def test_customized_model_trains_with_trls_losses(make: Callable[[], Any], tmp_path: Path) -> None:
    if make is customized.prefix_tuning and "past_key_values" not in inspect.signature(LlamaModel.forward).parameters:
        pytest.skip("peft looks for past_key_values, which transformers 5.24 calls cache")
    trainer, ours = customized.losses(trl_tpu, make(), tmp_path)
    assert trainer.batch_plan.padding_reason is not None
    _, reference = customized.losses(trl, make(), tmp_path)
    assert ours == pytest.approx(reference, abs=1e-5)
    with pytest.raises(ValueError, match=f"packing.*{CASES[make]}"):
        customized.losses(trl_tpu, make(), tmp_path, packing=True)
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
    trainer, ours = customized.losses(trl_tpu, customized.plain(), tmp_path, change)
    assert trainer.batch_plan.padding_reason is not None
    evaluated = trainer.evaluate(trainer.train_dataset)
    for name, logs in {"num_tokens": trainer.state.log_history[0], "eval_num_tokens": evaluated}.items():
        assert (name in logs) == (change is collator), "custom losses count no tokens"
    _, reference = customized.losses(trl, customized.plain(), tmp_path, change)
    _, unchanged = customized.losses(trl, customized.plain(), tmp_path)
    assert ours == pytest.approx(reference, abs=1e-5)
    assert ours != pytest.approx(unchanged, abs=1e-5)


SINGLE_TOKEN_ADAPTERS = [
    peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], use_dora=True),
    peft.IA3Config(task_type="SEQ_CLS", target_modules=["k_proj"], feedforward_modules=[]),
    peft.LNTuningConfig(task_type="SEQ_CLS", target_modules=["input_layernorm"]),
]


@pytest.mark.parametrize("config", SINGLE_TOKEN_ADAPTERS, ids=lambda config: config.peft_type.value)
def test_adapters_that_act_on_single_tokens_stay_packed(config: Any, tmp_path: Path) -> None:
    packed, ours = customized.losses(trl_tpu, customized.adapted(config), tmp_path)
    assert packed.batch_plan.padding_reason is None
    _, padded = customized.losses(trl_tpu, customized.adapted(config), tmp_path, packing=False)
    assert ours == pytest.approx(padded, abs=1e-5)


# ---- evaluation


FEW = PAIRS.select(range(11))


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
    given = {"train_dataset": FEW, "processing_class": TOKENIZER, "compute_metrics": compute_metrics}
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
