"""Uploads beside training."""

import logging
from typing import Any

from transformers import Trainer

logger = logging.getLogger(__name__)


def report_pushes(trainer: Trainer) -> None:
    """Say which uploads beside training failed, whose errors transformers drops."""
    jobs: list[Any] = getattr(getattr(trainer, "push_in_progress", None), "jobs", [])
    for job in [job for job in jobs if job.done()]:
        jobs.remove(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            logger.error("An upload to %s FAILED, the repository is as before: %s", trainer.hub_model_id, error)
