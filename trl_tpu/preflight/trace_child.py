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
from ..errors import UserError
from ..modeling.model_shape import model_without_weights
from ..packing.schedule import RowPlan
from ..packing.shapes import RowShape
from ..parallel.mesh import names_of
from ..runtime import PartitionSpec
from ..runtime.placeholder import Input, PlaceholderRuntime, Program
from ..trainer.reward_config import RewardConfig
from ..trainer.reward_trainer import RewardTrainer
from ..training.optimizer import bare
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
    tracer = _Tracer(request.chips)
    runtime.replace(tracer.runtime)
    tracer.trainer = trainer_of(request, model_without_weights(request.model, request.dtype))
    tracer.trainer.add_callback(_FirstStep(tracer))
    mesh = dict(tracer.trainer.args.mesh_shape.sizes)
    with contextlib.suppress(_Traced):
        tracer.trainer.train()
    # of a step's programs the one that takes a batch; each is there as often as it was run
    programs = tracer.programs
    over_batch = max(programs, key=lambda each: (any(_kind(given) == "batch" for given in each.inputs), len(each.hlo)))
    state = {_name(each): each for program in programs for each in program.inputs if _kind(each) in _STATE}
    taken = {_name(each) for each in over_batch.inputs}
    held: dict[str, int] = {}
    for each in state.values():
        held[_kind(each)] = held.get(_kind(each), 0) + _bytes_per_chip(each, mesh)
    return TracedProgram(
        over_batch.hlo,
        tuple(hlo_sharding(mesh, _axes(each)) for each in over_batch.inputs),
        tuple(each.donated for each in over_batch.inputs),
        request.chips,
        mesh,
        held,
        idle=sum(_bytes_per_chip(each, mesh) for name, each in state.items() if name not in taken),
    )


class _Tracer:
    """Keeps the programs of the trainer's first step, and says what their arguments are."""

    def __init__(self, chips: int) -> None:
        self.runtime = PlaceholderRuntime(chips, self._see)
        self.programs: list[Program] = []
        self.trainer: Any = None
        self._begun = self._ended = False

    def begin(self) -> None:
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

    def end(self) -> None:
        self._ended = True

    def _see(self, program: Program) -> None:
        if not self._begun:
            return
        self.programs.append(program)
        if self._ended:
            self._begun = False  # a trainer that stops computes too
            raise _Traced


class _FirstStep(TrainerCallback):
    def __init__(self, tracer: _Tracer) -> None:
        self._tracer = tracer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._tracer.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._tracer.end()


def _kind(given: Input) -> str:
    return given.known.kind if given.known is not None else "other"


def _name(given: Input) -> str:
    return given.known.name if given.known is not None else ""


def _axes(given: Input) -> PartitionSpec:
    return given.known.axes if given.known is not None else (None,) * len(given.shape)


def _bytes_per_chip(given: Input, mesh: Mapping[str, int]) -> int:
    parts = prod(mesh[axis] for over in _axes(given) for axis in names_of(over))
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
    if args.train_batch_size != request.pairs:
        raise UserError(
            f"per_device_train_batch_size={args.per_device_train_batch_size} makes batches of {args.train_batch_size} "
            f"pairs on {request.chips} chips, not of {request.pairs}."
        )
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))  # nothing is tokenized
    rows = RowPlan((RowShape(request.rows or request.pairs, request.length),))
    trainer: RewardTrainer = type("RewardTrainer", (RewardTrainer,), {"fixed_rows": rows})(
        model=model,
        args=args,
        train_dataset=_full_pairs(request, 2 * accumulation),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        peft_config=request.peft,
    )
    reason = trainer.batch_plan.padded_because
    if request.rows is not None and reason is not None:
        raise UserError(f"Batches are padded, not packed: {reason}. Plan with --packing false.")
    return trainer


def _full_pairs(request: StepRequest, batches: int) -> Dataset:
    """Token pairs whose batches have exactly the requested shape: packed, all share out the rows evenly."""
    if request.rows is not None:
        size = request.length // -(-request.pairs // request.rows)
        answer = max(1, size // 4)
        prompt = size - 2 * answer
    else:
        answer = max(1, request.length // 4)
        prompt = request.length - answer
    rows = []
    for number in range(request.pairs * batches):  # pairs share no first token, nor do answers
        begin = [2 + number % 2, *([4 + number // 2 % 2] * (prompt - 1))]
        rows.append({"chosen_ids": begin + [6] * answer, "rejected_ids": begin + [7] * answer})
    return Dataset.from_list(rows)
