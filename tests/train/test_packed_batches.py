"""Packed batches in plain torch, in tight rows or in fixed rows of several micro-batches: resumes, and scripts.

`tests/unit/test_batch.py` compares layouts in float64. `test_numbers_equal_trl.py`, `test_rankings.py` and
`test_evaluation.py` compare packed training and evaluation with TRL, padded rows and single sequences.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training import QUIET, differing, losses, trained
from transformers import TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.data.trl_dict import batches_in
from trl_tpu.modeling import forward
from trl_tpu.modeling.losses import Loss, batch_loss
from trl_tpu.packing.shapes import BatchShape, ShapePlan


class Recorder(RewardTrainer):
    """Records the token ids of its training batches, packed or padded."""

    def reads_padded_rows(self) -> None:
        """Allow packing: the override only observes."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.__dict__.setdefault("seen", []).append([part.input_ids_RL.tolist() for part in inputs.parts])
        return super().training_step(model, inputs, num_items_in_batch)


class FixedRows(Recorder):
    fixed_shapes = ShapePlan((BatchShape(1, 48),), (BatchShape(1, 64),))  # most batches need several micro-batches


LAYOUTS: dict[str, Any] = {"plain": RewardTrainer, "tight": Recorder, "micro-batches": FixedRows}


def make_trainer(tokenizer: Any, out: Path, layout: str = "tight", callbacks: Any = None, **settings: Any) -> Any:
    model = tiny.tiny_model(tokenizer)
    defaults = QUIET | {"save_strategy": "no", "logging_steps": 1, "max_steps": 6}
    more = {"callbacks": callbacks, "train_dataset": tiny.made_up_pairs(22)}
    args = RewardConfig(str(out), **(defaults | settings))
    return LAYOUTS[layout](model, args, processing_class=tokenizer, **more)


def test_compiled_layers_are_one_program_for_all_shapes(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches differ in numbers of tokens, trees and token rows. A single token row is another program."""
    batch = {"packing": True, "per_device_train_batch_size": 4}
    expected = losses(trained(make_trainer(tokenizer, tmp_path, **batch)))
    for name in ("BACKEND", "MODE"):  # transformers sets them for the whole process
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "")
    counters.clear()
    compiled = make_trainer(tokenizer, tmp_path, torch_compile=True, torch_compile_backend="aot_eager", **batch)
    assert losses(trained(compiled)) == pytest.approx(expected, abs=1e-6)
    shapes = {(len(part), len(part[0])) for (part,) in compiled.__dict__["seen"]}
    assert len(shapes) > 3 and {rows for rows, _ in shapes} > {1}
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def rms_norm(self: Any, states: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(states, states.shape[-1:], self.weight, self.variance_epsilon)


def test_liger_kernels_compute_packed_rows(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger replaces forwards that compute each token alone. Its kernels need a GPU: here they are torch's."""
    liger: Any = ModuleType("liger_kernel.transformers")
    norm = FunctionType(rms_norm.__code__, vars(liger) | {"torch": torch})

    def apply(model: Any, **config: bool) -> None:
        assert config == {"fused_linear_cross_entropy": False}
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.forward = MethodType(norm, module)

    liger._apply_liger_kernel_to_instance = apply
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, liger)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)
    expected = losses(trained(make_trainer(tokenizer, tmp_path)))
    trainer = trained(make_trainer(tokenizer, tmp_path, packing=True, use_liger_kernel=True))
    assert losses(trainer) == pytest.approx(expected, abs=1e-6)
    assert trainer.model.model.norm.forward.__func__ is norm


class Reads(TorchDispatchMode):
    """Counts operations that read a number, or a size, from the device."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        has_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        self.total += has_mask or name in ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2")
        return function(*args, **kwargs or {})


class Copies(TorchFunctionMode):
    """Counts copies to the host, which are no operations on a CPU."""

    total = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, text = getattr(function, "__name__", ""), [each for each in args[1:] if isinstance(each, str)]
        self.total += name in ("cpu", "numpy", "tolist") or (name == "to" and text == ["cpu"])
        return function(*args, **kwargs or {})


class CountReads(TrainerCallback):
    """Counts reads of each step. Logs are written between steps."""

    def __init__(self) -> None:
        self.at_step: list[int] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.modes, self.stack = (Reads(), Copies()), ExitStack()
        for mode in self.modes:
            self.stack.enter_context(mode)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.stack.close()
        self.at_step.append(sum(mode.total for mode in self.modes))


@pytest.mark.parametrize(
    ("few_kernels", "settings", "expected"),
    [(False, {}, 0), (True, {}, 0), (True, {"optim": "sgd"}, 1), (True, {"packing": False}, 2)],
)
def test_steps_read_nothing_from_the_device(
    few_kernels: bool, settings: Any, expected: int, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizers without a fused kernel skip nonfinite steps by a read, and transformers looks for padding by two."""
    monkeypatch.setattr(forward, "few_kernels", lambda _: few_kernels)
    reads = CountReads()
    make_trainer(tokenizer, tmp_path, "plain", callbacks=[reads], **settings).train()
    assert reads.at_step == [expected] * 6


@pytest.mark.parametrize(("layout", "grouped"), [("tight", True), ("micro-batches", False)])
def test_resumed_run_packs_the_same_batches(layout: str, grouped: bool, tokenizer: Any, tmp_path: Path) -> None:
    """The resumed run starts within the second epoch and trains through the third, with bitwise equal weights."""
    settings = {"save_strategy": "steps", "save_steps": 8, "max_steps": 16, "per_device_train_batch_size": 4}
    settings |= {"group_by_prompt": grouped}
    whole, resumed = (make_trainer(tokenizer, tmp_path, layout, **settings) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert len(whole.__dict__["seen"]) == 16
    assert whole.__dict__["seen"][8:] == resumed.__dict__["seen"]
    assert len({str(batch) for batch in whole.__dict__["seen"]}) == 16  # each epoch has a different order
    assert losses(whole) == losses(resumed) and differing(whole, resumed) == []


@pytest.mark.parametrize(("layout", "packing"), [("tight", True), ("micro-batches", True), ("tight", False)])
def test_scripts_may_read_a_batch_as_trls_dict(layout: str, packing: bool, tokenizer: Any, tmp_path: Path) -> None:
    """A loop over the items, as in callbacks, gives TRL's dict; the logits of a loss by hand are in its order."""
    settings: dict[str, Any] = {"packing": packing, "per_device_eval_batch_size": 5}
    trainer, held_out = make_trainer(tokenizer, tmp_path, layout, **settings), tiny.made_up_pairs(8, seed=1)
    rows, first = trainer._prepared(held_out, "eval"), 0
    for batch in trainer.get_eval_dataloader(held_out):
        moved = {key: tensor.to("cpu") for key, tensor in batch.items()}
        pairs = len(moved["input_ids"]) // 2
        theirs = trainer.batch_plan.default_collator()([rows[at] for at in range(first, first + pairs)])
        assert list(moved) == list(theirs) and all(torch.equal(moved[key], theirs[key]) for key in theirs)
        trainer.model.eval()
        with torch.no_grad():
            loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
            of_dict, expected = trainer.compute_loss(trainer.model, moved, return_outputs=True)
            by_hand = batch_loss(trainer.model, batches_in(batch, trainer.processing_class.pad_token_id), Loss())
        assert outputs.logits.shape == (2 * pairs, 1) and loss.item() == pytest.approx(of_dict.item(), abs=1e-6)
        np.testing.assert_allclose(outputs["logits"], expected.logits, atol=1e-6)
        predicted = trainer.prediction_step(trainer.model, batch, False)
        assert loss.item() == by_hand.loss.item() == predicted[0].item()
        np.testing.assert_allclose(predicted[1][:pairs].T.reshape(-1, 1), expected.logits, atol=1e-6)
        first += pairs
    assert first == 8
