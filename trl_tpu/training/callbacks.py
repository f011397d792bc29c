"""What transformers' callbacks and pushes leave to be done around a save and an end."""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

logger = logging.getLogger(__name__)

_OWN = __package__.partition(".")[0]


def exported_state(callbacks: Iterable[Any]) -> Any:
    """Return what `TrainerState` saves of ``callbacks``, as they are now."""
    exportable: list[Any] = [each for each in callbacks if isinstance(each, ExportableState)]
    return TrainerState(stateful_callbacks=exportable).stateful_callbacks


def watches_saves(callback: TrainerCallback) -> bool:
    """Return whether a callback may look for what was saved; those of this package do not."""
    kind = type(callback)
    return kind.on_save is not TrainerCallback.on_save and kind.__module__.partition(".")[0] != _OWN


def report_pushes(trainer: Trainer) -> None:
    """Say which uploads beside training failed, whose errors transformers drops."""
    jobs: list[Any] = getattr(getattr(trainer, "push_in_progress", None), "jobs", [])
    for job in [job for job in jobs if job.done()]:
        jobs.remove(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            logger.error("An upload to %s FAILED, the repository is as before: %s", trainer.hub_model_id, error)


@contextlib.contextmanager
def keeping_two(args: TrainingArguments) -> Iterator[None]:
    """Keep the checkpoint to resume from: with a limit of 1 a Trainer that ends deletes all but the best."""
    limit = args.save_total_limit
    args.save_total_limit = 2 if limit == 1 else limit
    try:
        yield
    finally:
        args.save_total_limit = limit
