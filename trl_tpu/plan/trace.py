"""Trace the trainer's step as a program for a mesh of any size, without weights, data or devices.

The trainer runs in a separate process, with placeholders instead of weights and batches; see
`trl_tpu.plan.placeholder`.
"""

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback

from .. import runtime
from ..data.kinds import Pairs, Rankings, Solutions
from ..data.kinds.solutions import NO_LABEL
from ..errors import UserError
from ..experimental.prm import PRMTrainer
from ..modeling.head_spec import HeadSpec
from ..modeling.heads import model_without_weights
from ..packing.shapes import BatchShape, ShapePlan
from ..trainer.reward_trainer import RewardTrainer
from .compile import TracedProgram, call_in_child, virtual_devices

# Settings that a trace replaces: no evaluations or saving, no settings of shapes or of the tokenizer.
_TRACE_SETTINGS = {
    "max_steps": 2,
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "load_best_model_at_end": False,
    "push_to_hub": False,
    **dict.fromkeys(("max_length", "row_length", "eos_token", "pad_token", "chat_template_path")),
}


@dataclass(frozen=True)
class StepRequest:
    """Settings of a trace.

    Args:
        model: Config of the model, with the head specification. No weights are read.
        chips: Number of devices in the mesh.
        length: Length of each token row in tokens.
        token_rows: Number of packed rows per batch, each of equal content; None pads, with one sequence per token row.
        arguments: Arguments of `RewardConfig`, including batch size and mesh.
        peft: A `peft.LoraConfig`; None trains the full model.
        dtype: Name of the weights' torch dtype.
        answers: Number of answers per ranking, or of steps per solution; None makes pairs.
        longest: Length of the longest token rows of other batches. It decides how packed rows attend.
    """

    model: PretrainedConfig
    chips: int
    length: int
    token_rows: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    peft: Any = None
    dtype: str = "float32"
    answers: int | None = None
    longest: int = 0


def trace_step(request: StepRequest) -> TracedProgram:
    """Return the program of a step, or of a micro-batch if `gradient_accumulation_steps` is above 1.

    Raises:
        RuntimeError: The trainer rejects the request. The message is the trainer's.
    """
    devices = virtual_devices(min(request.chips, 2))  # with one device nothing would be sharded
    return call_in_child(trace_here, request, environment=devices | {"HF_HUB_OFFLINE": "1"})


# ---- in a new process that has not used a device


def trace_here(request: StepRequest) -> TracedProgram:
    """Trace in this process; see `trace_step`. A process can trace only once."""
    from .placeholder import PlaceholderRuntime

    placeholders = PlaceholderRuntime(request.chips)
    runtime.replace(placeholders)
    with tempfile.TemporaryDirectory() as folder:
        trusts_code = request.arguments.get("trust_remote_code", False)
        trainer = make_trainer(request, model_without_weights(request.model, request.dtype, trusts_code), folder)
        trainer.add_callback(_FirstMicroBatch(placeholders))
        with contextlib.suppress(_Traced):
            trainer.train()
    return max(placeholders.programs, key=lambda program: len(program.hlo))


class _Traced(Exception):
    """End of the trainer's run after the micro-batch is traced."""


class _FirstMicroBatch(TrainerCallback):
    """Keep only the programs of the first micro-batch. Without gradient accumulation it is a full step."""

    def __init__(self, placeholders: Any) -> None:
        self._placeholders = placeholders

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._placeholders.programs.clear()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._placeholders.step_boundary()
        raise _Traced

    on_substep_end = on_step_end  # after a micro-batch that does not end the step


def make_trainer(request: StepRequest, model: PreTrainedModel, folder: str) -> RewardTrainer:
    """Make a trainer with micro-batches as requested.

    Args:
        request: The settings.
        model: The model to train.
        folder: The trainer's output folder.

    Raises:
        UserError: The request has packed rows, but the trainer would pad.
    """
    accumulation = min(2, request.arguments.get("gradient_accumulation_steps", 1))  # all run one program
    fixed = _TRACE_SETTINGS | {"output_dir": folder, "gradient_accumulation_steps": accumulation}
    trainer_type = RewardTrainer if HeadSpec.of(request.model).step_separator is None else PRMTrainer
    args = trainer_type._trl_tpu_config(**{**request.arguments, **fixed})
    batch_size = args.train_batch_size
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))  # a stub: nothing is tokenized
    lengths = request.length, max(request.length, request.longest)  # batches are short, and take the first
    shapes = ShapePlan(tuple(BatchShape(request.token_rows or batch_size, length) for length in lengths))
    trainer: RewardTrainer = type(trainer_type.__name__, (trainer_type,), {"fixed_shapes": shapes})(
        model=model,
        args=args,
        train_dataset=_make_dataset(request, 2 * accumulation * batch_size),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        peft_config=request.peft,
    )
    reason = trainer.batch_plan.padding_reason
    if request.token_rows is not None and reason is not None:
        raise UserError(f"Batches are padded, not packed: {reason}. Plan with --packing false.")
    return trainer


def _make_dataset(request: StepRequest, count: int) -> Dataset:
    """Make tokenized pairs, rankings or solutions: of full length for padded rows, short for packed rows.

    The content of packed rows does not affect the program.
    """
    answers, spec = request.answers or 2, HeadSpec.of(request.model)
    rows = list[dict[str, Any]]()
    for number in range(count):  # prompts differ, and answers differ in their first token
        prompt = [2 + number % 2, *[4 + number // 2 % 2] * (1 if request.token_rows else request.length - 2)]
        ids = [[*prompt, 6 + place] for place in range(answers)]
        grades = [[*range(answers)]] * len(spec.attributes) or [*range(answers)]
        if spec.step_separator is not None:
            solution = prompt + [4] * (answers if request.token_rows else 1)
            labels = [NO_LABEL] * (len(solution) - answers) + [1] * answers
            rows.append(dict(zip(Solutions.columns, (solution, labels), strict=True)))
        elif request.answers is not None:
            rows.append(dict(zip(Rankings.columns, (ids, grades), strict=True)))
        else:
            rows.append(dict(zip(Pairs.columns, ids, strict=True)))
    return Dataset.from_list(rows)
