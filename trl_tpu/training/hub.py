"""What goes wrong between a run and the Hub that it is pushed to."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from huggingface_hub.errors import HTTPError  # of the library it makes requests with: no connection, say
from transformers import Trainer

from ..errors import UserError

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def making_repository(args: Any) -> Iterator[None]:
    """Raise a UserError where the Hub refuses to make the repository that `args` names, or names it wrongly."""
    try:
        yield
    except (HTTPError, OSError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        name = f"hub_model_id={args.hub_model_id!r}"
        if args.hub_model_id is None:
            name = f"the name of output_dir={str(args.output_dir)!r}"
        raise UserError(
            f"push_to_hub=True, but the Hub gives no repository by {name} ({reason}). Give a hub_model_id that the "
            "login may write to, or leave push_to_hub out, and push later with `trl-tpu export`."
        ) from error


def report_pushes(trainer: Trainer) -> None:
    """Say which uploads beside training failed, whose errors transformers drops."""
    jobs: list[Any] = getattr(getattr(trainer, "push_in_progress", None), "jobs", [])
    for job in [job for job in jobs if job.done()]:
        jobs.remove(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            logger.error("An upload to %s FAILED, the repository is as before: %s", trainer.hub_model_id, error)
