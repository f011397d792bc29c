"""Effects of settings that TRL does not have or names differently.

`tests/unit/test_numbers_equal_trl.py` checks that losses under them equal TRL's on every runtime.
"""

import itertools
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import trl
from peft import LoraConfig
from safetensors.torch import load_file
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from training import differing, losses, state_of, trained, untimed
from transformers import SchedulerType, TrainerCallback
from transformers.optimization import get_scheduler

import trl_tpu
from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.errors import UserError
from trl_tpu.runtime.native import Runtime
from trl_tpu.training import progress
from trl_tpu.training.optimizer import create_schedule
from trl_tpu.training.progress import JsonLines

Make = Callable[..., RewardTrainer]


@pytest.fixture
def make(model_folder: str, config: Callable[..., RewardConfig]) -> Make:
    """Return a function that builds a trainer of 64 pairs, by default for 4 steps, in the test's folder."""

    def make(arguments: Any = (), **settings: Any) -> RewardTrainer:
        args = config(**{"max_steps": 4, "logging_steps": 1} | settings)
        return RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(64), **dict(arguments))

    return make


# ---- learning_rate


def test_default_learning_rate_warns_for_full_fine_tuning(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    def warns(**given: Any) -> bool:
        caplog.clear()
        make(given.pop("arguments", ()), **{"learning_rate": RewardConfig.learning_rate} | given)
        return any(log.levelname == "WARNING" and "learning_rate" in log.message for log in caplog.records)

    assert warns() and warns(frozen_parameters="norm")
    assert not warns(learning_rate=1e-5) and not warns(frozen_parameters="model")
    assert not warns(arguments={"peft_config": LoraConfig(task_type="SEQ_CLS", r=2)})


# ---- frozen_parameters


def test_frozen_parameters_stay_fixed_and_are_saved_and_resumed(make: Make, model_folder: str, tmp_path: Path) -> None:
    saves = {"frozen_parameters": "embed_tokens|layernorm", "save_strategy": "steps", "save_steps": 2}
    trainer = trained(make(**saves))
    before, after = (load_file(f"{each}/model.safetensors") for each in (model_folder, tmp_path / "checkpoint-4"))
    same = {name for name, weight in before.items() if torch.equal(after[name], weight)}
    frozen = {name for name in before if "embed_tokens" in name or "layernorm" in name}
    assert before.keys() == after.keys() and same == frozen and "model.norm.weight" not in same
    with_state = {id(parameter) for parameter in trainer.optimizer.optimizer.state}  # type: ignore[union-attr]
    assert with_state == {id(each) for name, each in trainer.model.named_parameters() if name not in frozen}

    elsewhere = saves | {"output_dir": str(tmp_path / "resumed")}
    trained(make(**elsewhere, max_steps=2))
    resumed = trained(make(**elsewhere), resume=True)
    assert resumed.state.global_step == 4
    after = resumed.model.cpu().state_dict()
    assert {name for name, weight in before.items() if torch.equal(after[name], weight)} == frozen


def test_frozen_parameters_freeze_matching_adapter_weights(make: Make) -> None:
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    trainer = make({"peft_config": lora}, frozen_parameters="lora_A|embed")
    kinds = {name.split(".")[-3] for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert kinds == {"lora_B", "modules_to_save"}


# ---- learning_rate_end


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_learning_rate_end_above_the_optimizers_rate_is_rejected(kind: str, make: Make) -> None:
    own = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1e-5})}
    trainer = make(own, learning_rate_end=1e-4, lr_scheduler_type=kind)
    with pytest.raises(UserError, match="learning_rate_end"):
        trainer.train()


# ---- total_batch_size


BATCH_SIZES = [
    ({}, (24, 1)),
    ({"gradient_accumulation_steps": 3}, (8, 3)),
    ({"per_device_train_batch_size": 8}, (8, 3)),  # equal to the default
    ({"per_device_train_batch_size": 6, "gradient_accumulation_steps": 4}, (6, 4)),
]


@pytest.mark.parametrize(("settings", "made"), BATCH_SIZES)
def test_total_batch_size_sets_missing_sizes(settings: dict[str, Any], made: tuple[int, int], tmp_path: Path) -> None:
    args = RewardConfig(str(tmp_path), report_to="none", bf16=False, total_batch_size=24, **settings)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == made


# ---- max_eval_steps


@pytest.mark.parametrize("streams", [False, True])
def test_max_eval_steps_limits_evaluation_but_not_prediction(streams: bool, make: Make) -> None:
    pairs: Any = tiny.made_up_pairs(11, seed=3)
    trainer = make(max_eval_steps=2, per_device_eval_batch_size=4)
    found, predicted = trainer.evaluate(pairs.to_iterable_dataset() if streams else pairs), trainer.predict(pairs)
    assert found["eval_pairs"] == 8 and "eval_pairs" not in predicted.metrics  # type: ignore[operator]
    assert len(predicted.predictions) == 11
    trainer.args.max_eval_steps = None
    expected = untimed(trainer.evaluate(pairs.select(range(8))))
    known = [name for name in expected if not (streams and "length" in name)]
    assert {name: found[name] for name in known} == {name: expected[name] for name in known}


# ---- optim_state_dtype


def test_bfloat16_moments_change_losses_little_and_resume_bitwise(make: Make, tmp_path: Path) -> None:
    """Losses differ by 5e-5 over 12 steps at rate 1e-3. Resuming with moments in the weights' dtype works, too."""
    saves = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6}
    in_float32, narrow = trained(make(max_steps=12)), {"optim_state_dtype": "bfloat16"}
    whole = trained(make(**saves, **narrow))
    moments = {tensor.dtype for name, tensor in state_of(whole).items() if name.endswith(" exp_avg")}
    assert moments == {torch.bfloat16} and losses(whole) != losses(in_float32)
    assert losses(whole) == pytest.approx(losses(in_float32), abs=5e-5)
    assert losses(whole)[-1] < losses(whole)[0] - 0.1
    checkpoint = str(tmp_path / "checkpoint-6")
    assert differing(trained(make(max_steps=12, **narrow), resume=checkpoint), whole) == []
    assert losses(trained(make(max_steps=12), resume=checkpoint)) == pytest.approx(losses(whole), abs=5e-5)


def test_optim_state_dtype_rejects_optimizers_without_moments(make: Make) -> None:
    trainer = make({"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}, optim_state_dtype="bfloat16")
    with pytest.raises(UserError, match="optim_state_dtype.*SGD"):
        trainer.train()


# ---- log_grad_norms, progress


class ClippedNorms(TrainerCallback):
    """Records the norms of the gradients passed to the optimizer."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.steps.append({f"grad_norm/{name}": each.grad.norm().item() for name, each in model.named_parameters()})


def test_json_logs_have_gradient_norms_before_clipping(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    clipped = ClippedNorms()
    settings = {"log_grad_norms": True, "gradient_accumulation_steps": 2, "max_grad_norm": 1e-3}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warned about `pin_memory` here
        trainer = trained(make({"callbacks": [clipped]}, progress="json", disable_tqdm=False, **settings))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{key: log[key] for key in sorted(log)} for log in trainer.state.log_history]
    for log, norms in zip(lines[:-1], clipped.steps, strict=True):
        found = {name: value * 1e-3 / log["grad_norm"] for name, value in log.items() if name in norms}
        assert found == pytest.approx(norms, rel=1e-3) and found.keys() == norms.keys() and log["grad_norm"] > 1e-2
    JsonLines().on_log(trainer.args, trainer.state, None, {"loss": math.nan, "margin": torch.tensor(-math.inf)})
    assert json.loads(capsys.readouterr().out) == {"step": 4, "loss": None, "margin": None}


@pytest.mark.parametrize("bars", [None, False, True])
def test_files_get_lines_and_no_bars_unless_asked_for(
    bars: bool | None, make: Make, capsys: Any, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(progress, "_MEASURED_SECONDS", 0)
    waits = itertools.count(step=1000.0)
    monkeypatch.setattr(progress, "seconds_without_core", lambda: next(waits))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    trainer = make(disable_tqdm=bars, eval_strategy="no")
    trained(trainer).evaluate(tiny.made_up_pairs(8))
    lines, bars_shown = capsys.readouterr()
    assert ("0/4 [" in bars_shown) is (bars is False) and lines.count("'loss'") == 4
    assert lines.startswith("Training on CPU") is (bars is not True)
    assert len([log for log in caplog.records if "OMP_NUM_THREADS" in log.message]) == 1


# ---- activation_offloading


@pytest.mark.parametrize("remat", ["full", "none"])
def test_activation_offloading_keeps_them_on_the_host(remat: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU tensors are not moved. Copies through numpy stand for host memory, so that moves are visible."""
    kept = losses(trained(make(remat=remat, max_steps=2)))
    offloaded = trained(make(remat=remat, max_steps=2, activation_offloading=True))
    assert isinstance(offloaded.maybe_activation_offload_context, save_on_cpu)
    assert losses(offloaded) == kept
    moved: list[tuple[int, ...]] = []

    def move(tensor: torch.Tensor) -> Any:
        moved.append(tuple(tensor.shape))
        return tensor.detach().cpu().numpy().copy()

    def bring_back(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(offloaded.args.device)

    monkeypatch.setattr(Runtime, "activations_on_host", lambda _: saved_tensors_hooks(move, bring_back))
    assert losses(trained(make(remat=remat, max_steps=1, activation_offloading=True))) == kept[:1]
    of_layers = [shape for shape in moved if len(shape) == 3 and shape[-1] == 32]
    assert 2 <= len(of_layers) <= 6 if remat == "full" else len(of_layers) > 10


@pytest.mark.parametrize("counted", ["all", "non_padding"])
def test_input_tokens_are_counted_as_in_trl(counted: str, model_folder: str, tmp_path: Path) -> None:
    seen = []
    for library in (trl, trl_tpu):
        settings = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "bf16": False, "use_cpu": True}
        args = library.RewardConfig(str(tmp_path), include_num_input_tokens_seen=counted, max_steps=3, **settings)
        trainer = library.RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(10))
        trainer.train()
        seen.append(trainer.state.num_input_tokens_seen)
    assert seen[1] == seen[0] > 0


# ---- schedules of short runs


#: Schedules that depend on the step alone.
OF_STEPS = sorted({kind.value for kind in SchedulerType} - {"reduce_lr_on_plateau", "greedy"})
ARGUMENTS: dict[str, Any] = {
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-5},
    "warmup_stable_decay": {"num_decay_steps": 1},
}


def rates(kind: str, steps: int, warmup: float, **settings: Any) -> list[float]:
    """Return the learning rate of each step, and the rate after the last one."""
    kwargs = ARGUMENTS.get(kind)
    args = RewardConfig("out", lr_scheduler_type=kind, warmup_steps=warmup, lr_scheduler_kwargs=kwargs, **settings)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    schedule, found = create_schedule(args, optimizer, steps), list[float]()
    for _ in range(steps + 1):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("kind", OF_STEPS)
def test_every_schedule_runs_for_any_number_of_steps_and_any_warmup(kind: str) -> None:
    """Rates equal transformers' where its own schedule does not divide by zero."""
    for steps in range(1, 6):
        for warmup in (0, 0.03, 1, steps, steps + 1):
            found = rates(kind, steps, warmup)
            assert all(0 <= rate <= 1e-4 for rate in found), (steps, warmup, found)
            count = math.ceil(steps * warmup) if warmup < 1 else int(warmup)
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
            if kind != "polynomial" or count < steps:
                schedule: Any = get_scheduler(kind, optimizer, count, steps, ARGUMENTS.get(kind))
                expected = [1e-4 * schedule.lr_lambdas[0](step) for step in range(steps + 1)]
                assert found == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "cycles"), [("linear", None), ("cosine", 0.5), ("cosine", 1)])
def test_rate_decays_to_its_end_unless_all_steps_warm_up(kind: str, cycles: float | None, monkeypatch: Any) -> None:
    monkeypatch.setitem(ARGUMENTS, kind, cycles and {"num_cycles": cycles})

    def share(done: float) -> float:
        return 1 - done if cycles is None else (1 + math.cos(2 * math.pi * cycles * done)) / 2

    for steps in range(1, 6):
        for warmup in range(steps + 1):
            found = rates(kind, steps, warmup, learning_rate_end=2e-5)
            decay = [2e-5 + 8e-5 * share(step / (steps - warmup)) for step in range(steps - warmup)]
            last = 2e-5 + 8e-5 * share(1) if warmup < steps else 1e-4
            assert found == pytest.approx([*(1e-4 * step / warmup for step in range(warmup)), *decay, last])


def test_schedule_that_cannot_compute_a_rate_is_rejected_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARGUMENTS, "polynomial", {"power": -1.0})  # the last rate divides by zero
    with pytest.raises(ZeroDivisionError):
        rates("polynomial", 3, 0)
