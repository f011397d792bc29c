"""Trace the step that the trainer runs, as a program for a mesh of any size, without weights, data or devices.

The trainer itself is run, in a process of its own, with placeholders in place of weights and batches: see
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
from ..config.reward_config import RewardConfig
from ..data.length_stats import NO_LABEL, PAIR, RANKING, SOLUTION
from ..errors import UserError
from ..experimental.prm import PRMConfig, PRMTrainer
from ..modeling.head_spec import HeadSpec
from ..modeling.model_shape import model_without_weights
from ..packing.shapes import RowPlan, RowShape
from ..trainer.reward_trainer import RewardTrainer
from .compile import TracedProgram, call_in_child

# Settings that a trace replaces: evaluations, saving, other shapes, and those of a real tokenizer.
_FIXED = {
    "max_steps": 2,
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "max_length": None,
    "row_length": None,
    "eos_token": None,
    "pad_token": None,
    "chat_template_path": None,
}


@dataclass(frozen=True)
class StepRequest:
    """Settings of a trace.

    Args:
        model: A model's config, which says what its outputs are; no weights are read.
        chips: In the mesh.
        length: Columns of each row.
        rows: Packed rows, over which the pairs of a batch are dealt out evenly; None pads, a row to each dialogue.
        arguments: Of `RewardConfig`, its batch size and mesh among them.
        peft: A `peft.LoraConfig`; None trains the whole model.
        dtype: That of the weights, by torch's name.
        answers: Of each prompt, to make rankings, or steps of each solution; None makes pairs.
    """

    model: PretrainedConfig
    chips: int
    length: int
    rows: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    peft: Any = None
    dtype: str = "float32"
    answers: int | None = None


def trace_step(request: StepRequest) -> TracedProgram:
    """Return the program that goes over a batch: a whole step, or with `gradient_accumulation_steps` a micro-batch.

    Raises:
        RuntimeError: The trainer refuses the request; with what it says.
    """
    environment = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(min(request.chips, 2)),  # where there is one, nothing is sharded
        "USE_TORCH_XLA": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return call_in_child(trace_here, request, environment=environment)


# ---- in a process that has used no device


def trace_here(request: StepRequest) -> TracedProgram:
    """Trace in this process, which can do so once; see `trace_step`."""
    from .placeholder import PlaceholderRuntime

    placeholders = PlaceholderRuntime(request.chips)
    runtime.replace(placeholders)
    with tempfile.TemporaryDirectory() as folder:
        trusts_code = request.arguments.get("trust_remote_code", False)
        trainer = trainer_of(request, model_without_weights(request.model, request.dtype, trusts_code), folder)
        trainer.add_callback(_FirstMicroBatch(placeholders))
        with contextlib.suppress(_Traced):
            trainer.train()
    return max(placeholders.programs, key=lambda each: len(each.hlo))


class _Traced(Exception):
    """Ends the trainer's run once the micro-batch is traced."""


class _FirstMicroBatch(TrainerCallback):
    """Keep the programs of the first micro-batch, which is a whole step unless gradients accumulate."""

    def __init__(self, placeholders: Any) -> None:
        self._placeholders = placeholders

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._placeholders.programs.clear()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._placeholders.step_boundary()
        raise _Traced

    on_substep_end = on_step_end  # after a micro-batch that does not end the step


def trainer_of(request: StepRequest, model: PreTrainedModel, folder: str) -> RewardTrainer:
    """Make a trainer of ``model`` whose micro-batches are all as requested, and which may write to ``folder``.

    Raises:
        UserError: Packed rows are requested, and the trainer would pad.
    """
    accumulation = min(2, request.arguments.get("gradient_accumulation_steps", 1))  # all are the same program
    fixed = _FIXED | {"output_dir": folder, "gradient_accumulation_steps": accumulation}
    of_steps = HeadSpec.of(request.model).step_separator is not None
    config, trainer_type = (PRMConfig, PRMTrainer) if of_steps else (RewardConfig, RewardTrainer)
    args = config(**{**request.arguments, **fixed})
    pairs = args.train_batch_size
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))  # nothing is tokenized
    rows = RowPlan((RowShape(request.rows or pairs, request.length),))
    trainer: RewardTrainer = type(trainer_type.__name__, (trainer_type,), {"fixed_rows": rows})(
        model=model,
        args=args,
        train_dataset=_pairs(request, 2 * accumulation * pairs),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        peft_config=request.peft,
    )
    reason = trainer.batch_plan.padded_because
    if request.rows is not None and reason is not None:
        raise UserError(f"Batches are padded, not packed: {reason}. Plan with --packing false.")
    return trainer


def _pairs(request: StepRequest, count: int) -> Dataset:
    """Make token pairs, rankings or solutions: in padded rows of full length, in packed rows short ones.

    What packed rows hold does not change their program.
    """
    answers, outputs = request.answers or 2, HeadSpec.of(request.model)
    rows = list[dict[str, Any]]()
    for number in range(count):  # neither pairs nor answers share their first token
        prompt = [2 + number % 2, *[4 + number // 2 % 2] * (1 if request.rows else request.length - 2)]
        ids = [[*prompt, 6 + place] for place in range(answers)]
        grades = [[*range(answers)]] * len(outputs.attributes) or [*range(answers)]
        if outputs.step_separator is not None:
            solution = prompt + [4] * (answers if request.rows else 1)
            labels = [NO_LABEL] * (len(solution) - answers) + [1] * answers
            rows.append(dict(zip(SOLUTION, (solution, labels), strict=True)))
        elif request.answers is not None:
            rows.append(dict(zip(RANKING, (ids, grades), strict=True)))
        else:
            rows.append(dict(zip(PAIR, ids, strict=True)))
    return Dataset.from_list(rows)
