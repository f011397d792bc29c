"""What a resumed run goes on adding up between two logs: rewards, tokens, the loss, nonfinite steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from .metrics import RewardSums


def own_part(parts: Sequence[Mapping[str, Any]], index: int, count: int) -> Mapping[str, Any]:
    """Return what process ``index`` of ``count`` goes on from, of what each had added up at the save.

    Where their number has changed, the first process takes all sums, and each the mean loss.
    """
    if len(parts) == count:
        return parts[index]
    sums = [RewardSums(**part["metrics"]["open"]) for part in parts] if index == 0 else []
    loss = sum(part["open_loss"] for part in parts) / len(parts)
    metrics = parts[0]["metrics"] | {"open": vars(sum(sums, RewardSums()))}
    return dict(parts[0]) | {"metrics": metrics, "open_loss": loss}
