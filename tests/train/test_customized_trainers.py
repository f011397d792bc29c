"""Subclassed trainers train like the same subclass of TRL's trainer."""

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import hyperparameter_search
import pytest
import tiny
import torch
import trl
from datasets import Dataset
from training import losses, trained

import trl_tpu
from trl_tpu.errors import UserError

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
