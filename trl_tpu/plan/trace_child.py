"""Traces one step, in a process of its own: see `trace.trace_step`."""

import contextlib
import tempfile
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback

from .. import runtime
from ..config.reward_config import RewardConfig
from ..errors import UserError
from ..modeling.model_shape import model_without_weights
from ..packing.schedule import RowPlan
from ..packing.shapes import RowShape
from ..parallel.mesh import names_of
from ..runtime import PartitionSpec
from ..trainer.reward_trainer import RewardTrainer
from ..training.optimizer import bare
from .placeholder import Input, PlaceholderRuntime, Program
from .trace import StepRequest, TracedProgram

_STATE = ("weight", "optimizer", "gradient")

# what a trace cannot do is turned off: logging, saving, other shapes
_FIXED = {
    "max_steps": 2,
    "logging_steps": 1000,
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "max_length": None,
    "max_shapes": 1,
    "row_length": None,
}


class _Traced(Exception):
    """Ends the trainer's run: the step is there."""


def trace_here(request: StepRequest) -> TracedProgram:
    """See `trace.trace_step`; once in a process, which must not have used a device."""
    first_step = _FirstStep(request.chips)
    runtime.replace(first_step.runtime)
    trainer = trainer_of(request, model_without_weights(request.model, request.dtype))
    first_step.trainer = trainer
    trainer.add_callback(first_step)
    mesh = dict(trainer.args.mesh_shape.sizes)
    with contextlib.suppress(_Traced):
        trainer.train()
    # of a step's programs the one that takes a batch; each is there as often as it was run
    programs = first_step.programs
    over_batch = max(
        programs, key=lambda each: ("batch" in {given.known.kind for given in each.inputs}, len(each.hlo))
    )
    state = {each.known: each for program in programs for each in program.inputs if each.known.kind in _STATE}
    taken = {each.known for each in over_batch.inputs}
    sizes = {known: _bytes_per_chip(each, mesh) for known, each in state.items()}
    return TracedProgram(
        over_batch.hlo,
        tuple(hlo_sharding(mesh, each.known.axes) for each in over_batch.inputs),
        tuple(each.donated for each in over_batch.inputs),
        request.chips,
        mesh,
        {kind: sum(size for known, size in sizes.items() if known.kind == kind) for kind in _STATE},
        idle=sum(size for known, size in sizes.items() if known not in taken),
    )


class _FirstStep(TrainerCallback):
    """Keeps the programs of the trainer's first step, and says what their arguments are."""

    def __init__(self, chips: int) -> None:
        self.runtime = PlaceholderRuntime(chips, self._see)
        self.programs: list[Program] = []
        self.trainer: Any = None
        self._begun = self._ended = False

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """What is recorded from now on is the step's."""
        trainer, know = self.trainer, self.runtime.know
        axes_of = trainer._step_state.specs(trainer.model, trainer.shard_report.placements)
        optimizer = bare(trainer.optimizer)
        buffers = trainer._step_state.gradient_buffers
        for name, parameter in trainer.model.named_parameters():
            axes = axes_of[parameter]
            know(parameter, name, "weight", axes)
            for key, state in optimizer.state.get(parameter, {}).items():
                if isinstance(state, torch.Tensor) and state.device.type == "xla":
                    alike = state.shape == parameter.shape
                    know(state, f"{key} of {name}", "optimizer", axes if alike else (None,) * state.dim())
            if parameter in buffers:
                know(buffers[parameter], f"gradient of {name}", "gradient", axes)
        self._begun = True

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._ended = True

    def _see(self, program: Program) -> None:
        if not self._begun:
            return
        self.programs.append(program)
        if self._ended:
            self._begun = False  # a trainer that stops computes too
            raise _Traced


def _bytes_per_chip(given: Input, mesh: Mapping[str, int]) -> int:
    parts = prod(mesh[axis] for over in given.known.axes for axis in names_of(over))
    return prod(given.shape) * given.dtype.itemsize // parts


def hlo_sharding(mesh: Mapping[str, int], axes: PartitionSpec) -> str:
    """A layout over a mesh, whose devices are numbered with the last axis fastest, in HLO's words."""
    names = list(mesh)
    over = [[axis for axis in names_of(each) if mesh[axis] > 1] for each in axes]
    used = [axis for dimension in over for axis in dimension]
    if not used:
        return "{replicated}"
    rest = [axis for axis in names if axis not in used]
    copies = prod(mesh[axis] for axis in rest)
    tiles = [prod(mesh[axis] for axis in dimension) for dimension in over] + [copies] * (copies > 1)
    order = [names.index(axis) for axis in (*used, *rest)]
    devices = np.arange(prod(mesh.values())).reshape(*mesh.values()).transpose(order).ravel()
    last = " last_tile_dim_replicate" if copies > 1 else ""
    return f"{{devices=[{','.join(map(str, tiles))}]{','.join(map(str, devices))}{last}}}"


def trainer_of(request: StepRequest, model: PreTrainedModel) -> RewardTrainer:
    """A trainer of ``model`` whose micro-batches are all as requested."""
    accumulation = min(2, request.arguments.get("gradient_accumulation_steps", 1))  # all are the same program
    fixed = _FIXED | {"output_dir": tempfile.mkdtemp(), "gradient_accumulation_steps": accumulation}
    args = RewardConfig(**{**request.arguments, **fixed})
    pairs = args.train_batch_size
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))  # nothing is tokenized
    rows = RowPlan((RowShape(request.rows or pairs, request.length),))
    trainer: RewardTrainer = type("RewardTrainer", (RewardTrainer,), {"fixed_rows": rows})(
        model=model,
        args=args,
        train_dataset=_full_pairs(request, pairs, 2 * accumulation),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        peft_config=request.peft,
    )
    reason = trainer.batch_plan.padded_because
    if request.rows is not None and reason is not None:
        raise UserError(f"Batches are padded, not packed: {reason}. Plan with --packing false.")
    return trainer


def _full_pairs(request: StepRequest, pairs: int, batches: int) -> Dataset:
    """Token pairs that fill the rows of batches of ``pairs``: all rows of packed ones alike."""
    in_a_row = -(-pairs // request.rows) if request.rows else 0
    size = request.length // max(in_a_row, 1)
    answer = max(1, size // 4)
    prompt = size - (2 if in_a_row else 1) * answer
    rows = []
    for number in range(pairs * batches):  # pairs share no first token, nor do answers
        begin = [2 + number % 2, *([4 + number // 2 % 2] * (prompt - 1))]
        rows.append({"chosen_ids": begin + [6] * answer, "rejected_ids": begin + [7] * answer})
    return Dataset.from_list(rows)
