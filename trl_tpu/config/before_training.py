"""What transformers would find out once the model is loaded, or at the first evaluation: found out before."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import huggingface_hub
import torch
from datasets import Dataset
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from torch import nn
from transformers import Trainer, get_scheduler
from transformers.integrations import INTEGRATION_TO_CALLBACK

from ..errors import UserError
from .metric_names import LENGTH_METRICS, METRICS

_READ_THE_MODEL = ("galore", "apollo", "lomo")  # optimizers
_TRIED_STEPS = 4
_HUB_TIMEOUT = 10  # seconds


# ---- by the settings alone


def check_update(args: Any) -> None:
    """Try the optimizer and the schedule on one weight.

    Raises:
        UserError: Names the setting, its value and what is wrong with it.
    """
    weight = nn.Parameter(torch.zeros(1))
    if not any(mark in args.optim for mark in _READ_THE_MODEL):
        with _refusing(args, "optim", "optim_args"):
            make, options = Trainer.get_optimizer_cls_and_kwargs(args)
            make([weight], **options)
    with _refusing(args, "lr_scheduler_type", "lr_scheduler_kwargs"):
        optimizer = torch.optim.SGD([weight], lr=args.learning_rate)
        schedule: Any = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=min(1, args.get_warmup_steps(_TRIED_STEPS)),
            num_training_steps=_TRIED_STEPS,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        metric = [0.0] if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy") else []
        for _ in range(_TRIED_STEPS):
            optimizer.step()
            schedule.step(*metric)
            rate = optimizer.param_groups[0]["lr"]
            if not math.isfinite(rate):
                raise ValueError(f"the learning rate becomes {rate}")


@contextmanager
def _refusing(args: Any, setting: str, options: str) -> Iterator[None]:
    """Turn what goes wrong into a UserError that names both settings."""
    try:
        yield
    except (ImportError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        name, given = getattr(args, setting), getattr(args, options)
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"{setting}={getattr(name, 'value', name)!r} with {options}={given!r} cannot be used: {reason}. Correct "
            f"{options}, or choose another {setting}."
        ) from error


def check_tracker_names(args: Any) -> None:
    """Raise UserError for a tracker that transformers does not know."""
    for name in args.report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(INTEGRATION_TO_CALLBACK)
            raise UserError(f"report_to names {name!r}, which is none of the trackers {known}; or write 'none'.")


# ---- by what else is there


def check_trackers(args: Any) -> None:
    """Raise UserError for a tracker that is not installed."""
    for name in args.report_to:
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (ImportError, RuntimeError, ValueError) as error:
            raise UserError(
                f"report_to={name!r} cannot be used: {error} Install it, or write report_to='none'."
            ) from error


def check_hub(args: Any) -> None:
    """Ask the Hub, where models are to be pushed, whether it knows the user; it has some seconds to answer.

    Raises:
        UserError: It does not, or cannot be reached.
    """
    if not args.push_to_hub or args.process_index != 0:  # the first process pushes
        return
    later = "or leave push_to_hub out, and push later with `trl-tpu export`"
    token = args.hub_token or huggingface_hub.get_token()
    if token is None:
        raise UserError(f"push_to_hub=True needs a login: run `hf auth login` or set HF_TOKEN, {later}.")
    asked = f"{huggingface_hub.constants.ENDPOINT}/api/whoami-v2"
    try:
        hf_raise_for_status(get_session().get(asked, headers=build_hf_headers(token=token), timeout=_HUB_TIMEOUT))
    except Exception as error:  # whatever the HTTP library of the day calls it
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise UserError(
            f"push_to_hub=True, but the Hub does not answer as it should ({reason}). Mend the connection or the "
            f"login, {later}."
        ) from error


def check_lengths(args: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Raise UserError where pairs are to be grouped by lengths that no column has."""
    strategy, column = args.train_sampling_strategy, args.length_column_name
    if strategy not in ("group_by_length", "batch_rebalance"):
        return
    evaluated = _sets_of(eval_dataset).values() if strategy == "group_by_length" else ()
    for dataset in (train_dataset, *evaluated):
        if isinstance(dataset, Dataset) and (args.remove_unused_columns or column not in dataset.column_names):
            raise UserError(
                f"train_sampling_strategy={strategy!r} reads lengths from a column {column!r} of the dataset, which "
                "has to be there, with remove_unused_columns=False. Leave it out: packed rows have no padding."
            )


def check_best_metric(args: Any, eval_dataset: Any) -> None:
    """Raise UserError where the best model is judged by what evaluation does not measure."""
    asked = args.metric_for_best_model
    if asked is None or args.eval_strategy == "no" or eval_dataset is None:
        return
    prefixes = [f"{name}_" if name else "" for name in _sets_of(eval_dataset)]
    known = [f"{prefix}{metric}" for prefix in prefixes for metric in (*METRICS, *LENGTH_METRICS)]
    if args.eval_by is not None:
        groups = {f"{prefix}accuracy/" for prefix in prefixes}
        known += [f"{prefix}mean_accuracy_over_groups" for prefix in prefixes]
        known += [asked.removeprefix("eval_")] if asked.removeprefix("eval_").startswith(tuple(groups)) else []
    if asked.removeprefix("eval_") not in known:
        raise UserError(
            f"metric_for_best_model={asked!r} is not measured in evaluation, which measures {', '.join(known)}. "
            "Choose one of them, or give a compute_metrics that returns it."
        )


def _sets_of(eval_dataset: Any) -> Mapping[str, Any]:
    """Return the datasets that evaluation is on, by name; a single one has none."""
    return eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
