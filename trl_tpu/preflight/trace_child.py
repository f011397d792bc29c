"""Traces one step in the process that it is run in: ``python -m trl_tpu.preflight.trace_child REQUEST PROGRAMS``."""

import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from .. import runtime
from ..errors import UserError
from ..packing.schedule import RowPlan
from ..packing.shapes import RowShape
from ..runtime.placeholder import Input, PlaceholderRuntime, Program
from ..trainer.reward_config import RewardConfig
from ..trainer.reward_trainer import RewardTrainer
from .trace import Argument, Rows, StepRequest, TracedProgram, hlo_sharding, parts_of


class _Traced(Exception):
    """Ends the trainer's run: the step is there."""


def trace_here(request: StepRequest) -> tuple[TracedProgram, ...]:
    """See `trace.trace_programs`; once in a process, which must not have used a device."""
    tracer = _Tracer(request.chips)
    runtime.replace(tracer.runtime)
    trainer = trainer_of(request, model_without_weights(request))
    mesh = dict(trainer.args.mesh_shape.sizes)
    tracer.watch(trainer)
    try:
        if request.what == "train":
            trainer.train()
        else:
            tracer.begin()
            trainer.evaluate()
    except _Traced:
        pass
    traced = [
        TracedProgram(program.hlo, tuple(_argument(each, mesh) for each in program.inputs), request.chips, mesh)
        for program in tracer.programs
    ]
    return tuple({program.hlo: program for program in traced}.values())


class _Tracer:
    """Keeps the programs of the trainer's first step, and says what their arguments are."""

    def __init__(self, chips: int) -> None:
        self.runtime = PlaceholderRuntime(chips, self._see)
        self.programs: list[Program] = []
        self._begun = self._ended = False
        self._trainer: Any = None

    def watch(self, trainer: Any) -> None:
        self._trainer = trainer
        trainer.add_callback(_FirstStep(self))

    def begin(self) -> None:
        """What is recorded from now on is the step's."""
        trainer, know = self._trainer, self.runtime.know
        axes_of = trainer._step_state.specs(trainer.model, trainer.shard_report.placements)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        buffers = trainer._step_state.gradient_buffers
        for name, parameter in trainer.model.named_parameters():
            axes = axes_of[parameter]
            know(parameter, name, "weight", axes)
            for key, state in (optimizer.state.get(parameter, {}) if optimizer is not None else {}).items():
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

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self._tracer.end()


def trainer_of(request: StepRequest, model: PreTrainedModel) -> RewardTrainer:
    """A trainer of ``model`` whose batches are all as requested."""
    args = RewardConfig(**_arguments(request, tempfile.mkdtemp()))
    batch = request.batch
    pairs = full_pairs(batch, packed=args.packing != "false", steps=2 * args.gradient_accumulation_steps)
    rows = RowPlan((RowShape(batch.rows or batch.pairs, batch.length),))
    trainer_class = type("RewardTrainer", (RewardTrainer,), {"fixed_rows": rows})
    trainer: RewardTrainer = trainer_class(
        model=model,
        args=args,
        train_dataset=pairs,
        eval_dataset=pairs,
        processing_class=_tokenizer(),
        peft_config=request.peft,
    )
    kind_of_batch = f"per_device_{'train' if request.what == 'train' else 'eval'}_batch_size"
    actual = args.train_batch_size if request.what == "train" else args.eval_batch_size
    if actual != batch.pairs:
        raise UserError(
            f"{kind_of_batch}={getattr(args, kind_of_batch)} makes batches of {actual} pairs on {request.chips} "
            f"chips, not of {batch.pairs}."
        )
    return trainer


def _arguments(request: StepRequest, folder: str) -> dict[str, Any]:
    """Those of the request, with all that a trace cannot do turned off: logging, saving, other shapes."""
    fixed = {
        "output_dir": folder,
        "max_steps": 2,
        "logging_steps": 1000,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "max_length": None,
        # all micro-batches are the same program
        "gradient_accumulation_steps": min(2, request.arguments.get("gradient_accumulation_steps", 1)),
        "max_shapes": 1,
        "row_length": None,
    }
    return {**request.arguments, **fixed}


def model_without_weights(request: StepRequest) -> PreTrainedModel:
    """The reward model of a request on torch's meta device."""
    request.model.num_labels = 1
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(request.model, dtype=getattr(torch, request.dtype))


def full_pairs(batch: Rows, *, packed: bool, steps: int) -> Dataset:
    """Token pairs whose batches have exactly the shape ``batch``: packed, all share out the rows evenly."""
    if packed:
        rows = batch.rows or batch.pairs
        size = batch.length // -(-batch.pairs // rows)
        answer = max(1, size // 4)
        prompt = size - 2 * answer
    else:
        answer = max(1, batch.length // 4)
        prompt = batch.length - answer
    return Dataset.from_list([_pair(number, prompt, answer) for number in range(batch.pairs * steps)])


def _pair(number: int, prompt: int, answer: int) -> dict[str, list[int]]:
    # pairs share no first token, nor do answers
    begin = [2 + number % 2, *([4 + number // 2 % 2] * (prompt - 1))]
    return {"chosen_ids": begin + [6] * answer, "rejected_ids": begin + [7] * answer}


def _tokenizer() -> PreTrainedTokenizerFast:
    """Nothing is tokenised; the trainer wants one for its special tokens."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def _argument(given: Input, mesh: dict[str, int]) -> Argument:
    known = given.known
    axes = known.axes if known is not None else (None,) * len(given.shape)
    return Argument(
        name=known.name if known is not None else "",
        kind=known.kind if known is not None else "other",
        shape=given.shape,
        dtype=str(given.dtype).removeprefix("torch."),
        bytes=torch.Size(given.shape).numel() * given.dtype.itemsize,
        parts=parts_of(mesh, axes),
        sharding=hlo_sharding(mesh, axes),
        donated=given.donated,
    )


def main() -> None:
    asked, answer = map(Path, sys.argv[1:])
    answer.write_bytes(pickle.dumps(trace_here(pickle.loads(asked.read_bytes()))))


if __name__ == "__main__":
    main()
