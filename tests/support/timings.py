"""What in logs is of time, memory and the process, and so another number in every run."""

from typing import Any

_TIMED = ("_runtime", "_per_second", "seconds_per_step", "mfu", "memory_gib", "compiled_programs")


def untimed(logs: dict[str, Any]) -> dict[str, Any]:
    """The logs without it."""
    return {key: value for key, value in logs.items() if not key.endswith(_TIMED)}
