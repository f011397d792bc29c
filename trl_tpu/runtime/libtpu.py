"""Flags of libtpu, the TPU's runtime and compiler, which it reads when it starts: ``LIBTPU_INIT_ARGS``.

What a user has put there stays, and what torch_xla adds on a TPU is kept.
"""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "LIBTPU_INIT_ARGS"

FLAGS: Mapping[str, str] = {
    # A product with a sharded weight could be computed in pieces, while the weight goes around in a ring. Weights are
    # gathered instead, while other work goes on, as in MaxText's recipes for v6e: DISABLE_COLLECTIVE_MATMUL in
    # https://github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}
"""What the trainer adds: each from a published recipe that was timed on TPUs."""

_TORCH_XLA: Mapping[str, str] = {
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}
_TORCH_XLA_V5: Mapping[str, str] = {
    "xla_enable_async_all_gather": "true",
    "xla_enable_async_collective_permute": "true",
}


def set_flags() -> None:
    """Add `FLAGS` to this process's environment, which libtpu reads when the first device is used.

    Without a libtpu nothing is added, and of another version only what it knows.
    """
    library = os.environ.get("TPU_LIBRARY_PATH") or os.environ.get("PTXLA_TPU_LIBRARY_PATH")  # torch_xla's choice
    if library and Path(library).is_file():
        os.environ[VARIABLE] = with_flags(os.environ.get(VARIABLE, ""), known(FLAGS, Path(library)))


def known(flags: Mapping[str, str], library: Path) -> dict[str, str]:
    """Return those of ``flags`` whose names are in a library: libtpu ends the process over any other."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {name: value for name, value in flags.items() if content.find(name.encode()) >= 0}


def torch_xla_flags(version: int) -> dict[str, str]:
    """Return what torch_xla 2.9 adds when it is imported on a TPU of generation ``version``."""
    return {**_TORCH_XLA, **(_TORCH_XLA_V5 if version == 5 else {})}


def with_flags(given: str, flags: Mapping[str, str]) -> str:
    """Return ``given`` and those of ``flags`` that it does not set."""
    said = {word.lstrip("-").partition("=")[0] for word in given.split()}
    return " ".join([*given.split(), *(f"--{name}={value}" for name, value in flags.items() if name not in said)])
