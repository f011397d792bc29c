"""What makes a run the same run: on every host that takes part in it, and when it is resumed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..data.measure import is_prepared, measure
from ..errors import UserError
from ..modeling.losses import Loss

_SETTINGS = (
    *("seed", "data_seed", "gradient_accumulation_steps", "group_by_prompt"),
    *("learning_rate", "learning_rate_end", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *(field.name for field in fields(Loss)),
    *(
        "attributes",
        "attribute_loss_weights",
        "margin_scale",
        "average_over",
        "disable_dropout",
        "frozen_parameters",
        "bf16",
        "nonfinite_limit",
    ),
)


def check_alike(runs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse hosts that were started with different arguments, data or checkpoints.

    Args:
        runs: What has to be the same everywhere, as each host has it.

    Raises:
        UserError: Names everything that differs, and each host's value.
    """
    faults = []
    for name in runs[0]:
        hosts_of: dict[str, list[int]] = {}
        for host, run in enumerate(runs):
            hosts_of.setdefault(json.dumps(run[name], default=str), []).append(host)
        if len(hosts_of) > 1:
            faults.append(f"{name} is " + " and ".join(f"{value} on {_named(on)}" for value, on in hosts_of.items()))
    if faults:
        raise UserError(
            f"All hosts must train the same run, but {'; '.join(faults)}. Start the same command on every host, with "
            "the same data, and an output_dir that all of them share."
        )


def order_of_pairs(args: Any, processes: int, train_dataset: Any) -> dict[str, Any]:
    """Return what each step depends on, its pairs and how it trains: a run in which it differs is not the same run."""
    order: dict[str, Any] = {name: getattr(args, name) for name in _SETTINGS}
    order["the batch"] = args.train_batch_size * processes
    return order | {"training data": digest(train_dataset)}


def describe_run(args: Any, eval_dataset: Any, resume: str | bool | None) -> dict[str, Any]:
    """Return what else has to be the same on every host of a mesh: over what mesh, and from which checkpoint."""
    run: dict[str, Any] = {"mesh": str(args.mesh_shape), "eval data": digest(eval_dataset)}
    run["the checkpoint to resume from"] = Path(resume).name if isinstance(resume, str) else bool(resume)
    run["the checkpoints"] = sorted(path.name for path in Path(str(args.output_dir)).glob("checkpoint-*"))
    return run


def digest(dataset: Any) -> Any:
    """Return how many pairs there are, and a checksum of all; None for a stream; of a dict, this of each dataset."""
    if isinstance(dataset, dict):
        return {name: digest(part) for name, part in dataset.items()}
    if not is_prepared(dataset):
        return None
    return f"{len(dataset)} pairs ({measure(dataset).checksum:08x})"


def _named(hosts: list[int]) -> str:
    more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    return f"{'host' if len(hosts) == 1 else 'hosts'} {', '.join(map(str, hosts[:8]))}{more}"
