"""Chooses the device before torch or transformers are imported."""

import glob
import mmap
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

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
_TORCH_XLA_V5 = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}
"""What torch_xla 2.9 adds when it is imported on a TPU, and what only on one of the fifth generation."""


def flags_for(topology: str, given: str = "") -> str:
    """Return the libtpu flags of a training on ``topology``, such as v5e:2x4, including the user's ``given`` ones."""
    return with_flags(given, {**_TORCH_XLA, **(_TORCH_XLA_V5 if topology.startswith("v5") else {}), **FLAGS})


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


def with_flags(given: str, flags: Mapping[str, str]) -> str:
    """Return ``given`` and those of ``flags`` that it does not set."""
    said = {word.lstrip("-").partition("=")[0] for word in given.split()}
    return " ".join([*given.split(), *(f"--{name}={value}" for name, value in flags.items() if name not in said)])


#: What torch_xla takes for a TPU: devices on the PCI bus of this vendor with these numbers. (torch_xla._internal.tpu)
PCI_VENDOR = "0x1ae0"
PCI_DEVICES = frozenset({"0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076"})

#: What torch_xla sets in the environment while it is imported, before it sets ``PJRT_DEVICE``.
SET_BY_TORCH_XLA = ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL", "GRPC_VERBOSITY")

_SWITCH = "USE_TORCH_XLA"
CPU = "ACCELERATE_USE_CPU"
_INSTALL = 'pip install -e ".[tpu]"'


@dataclass(frozen=True)
class Facts:
    """What the choice depends on."""

    has_torch_xla: bool
    has_libtpu: bool
    tpu_chips: int = 0
    """TPU chips of this host."""
    pjrt_device: str | None = None
    """The variable ``PJRT_DEVICE``, if it was set on purpose."""
    switch: str | None = None
    """The variable ``USE_TORCH_XLA``, if it was set on purpose."""
    misfit: str | None = None
    """Why the torch_xla that is installed cannot be used, if it cannot."""
    has_torch_tpu: bool = False
    accelerator: str | None = None
    """What torch itself takes for its accelerator, which is asked where torch_tpu is installed."""
    asks_for_cpu: bool = False
    """Whether accelerate is told to take the CPU."""


@dataclass(frozen=True)
class Choice:
    """Which runtime trains, and the reason and how to change it, for the log."""

    name: Literal["xla", "torchtpu", "native"]
    reason: str


def choose(facts: Facts) -> Choice:
    """Return the choice: the first rule that applies."""
    if facts.accelerator == "tpu" and facts.asks_for_cpu:
        return Choice("native", f"{CPU} is set")
    if facts.accelerator == "tpu":
        return Choice("torchtpu", f"torch's accelerator is a TPU, through TorchTPU; {CPU}=1 would choose the CPU")
    if facts.switch is not None and not _is_on(facts.switch):
        return Choice("native", f"{_SWITCH}={facts.switch} turns PyTorch/XLA off")
    if facts.misfit is not None:
        return Choice("native", facts.misfit)
    asked = "a TPU is attached" if facts.tpu_chips else None
    if facts.pjrt_device:
        asked = f"PJRT_DEVICE={facts.pjrt_device} is set"
    lacks = "libtpu" if facts.has_torch_xla else "torch_xla"
    if asked and facts.has_torch_xla and (facts.pjrt_device or facts.has_libtpu):
        return Choice("xla", f"{asked}; {_SWITCH}=0 would choose plain torch")
    if facts.has_torch_tpu and facts.tpu_chips:
        return Choice(
            "native", "a TPU is attached, but torch_tpu, which is installed, has not made it torch's accelerator"
        )
    if asked:
        return Choice("native", f"{asked}, but {lacks} is not installed (nor torch_tpu): {_INSTALL}")
    if not facts.has_torch_xla:
        return Choice("native", "no TPU is attached, and torch_xla is not installed")
    return Choice("native", "no TPU is attached; PJRT_DEVICE=CPU would choose PyTorch/XLA on the CPU")


def _is_on(value: str) -> bool:
    return value.upper() in ("1", "ON", "YES", "TRUE")


class _Settled:
    """What was chosen in this process."""

    choice: Choice | None = None
    set_switch = False
    """Whether ``USE_TORCH_XLA`` was set here."""
    came_late = False
    """Whether XLA had been started when plain torch was chosen."""


def settle() -> None:
    """Choose by the environment as it is now: when this package is imported, and again where it was changed since.

    Once transformers is imported, what it was told stays.
    """
    if _Settled.choice is not None and "transformers" in sys.modules:
        return
    if _Settled.set_switch and os.environ.get(_SWITCH) == "0":
        del os.environ[_SWITCH]
    facts = _facts()
    _Settled.choice = choose(facts)
    # one that does not fit is off whatever was asked for: where the switch is on, transformers would fail to import it
    asked = facts.switch is not None and (facts.misfit is None or not _is_on(facts.switch))
    _Settled.set_switch = _Settled.choice.name != "xla" and facts.has_torch_xla and not asked
    if facts.asks_for_cpu:  # whatever a process that trains on TorchTPU, and has started this one, has told accelerate
        os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    if _Settled.set_switch:
        torch_xla = sys.modules.get("torch_xla")
        _Settled.came_late = torch_xla is not None and torch_xla._XLAC._xla_runtime_is_initialized()
        _turn_xla_off()


def choice() -> Choice:
    """Return what this process trains on.

    Raises:
        RuntimeError: It is plain torch, but XLA had been started before.
    """
    assert _Settled.choice is not None  # importing this package settles it
    if _Settled.came_late:
        raise RuntimeError(
            f"This process is to train on plain torch, since {_Settled.choice.reason}. But XLA's devices were started "
            "before trl_tpu was imported: accelerate does that wherever torch_xla is installed. Import trl_tpu before "
            f"anything makes an Accelerator or TrainingArguments, or set {_SWITCH}=0 in the environment; or set "
            "PJRT_DEVICE=CPU there to train on PyTorch/XLA."
        )
    return _Settled.choice


def _facts() -> Facts:
    has_torch_tpu = find_spec("torch_tpu") is not None
    return Facts(
        has_torch_xla=find_spec("torch_xla") is not None,
        misfit=_misfit(),
        has_libtpu="TPU_LIBRARY_PATH" in os.environ or find_spec("libtpu") is not None,
        tpu_chips=sum(map(_is_tpu, glob.glob("/sys/bus/pci/devices/*"))),
        pjrt_device=_asked_device(),
        switch=os.environ.get(_SWITCH),
        has_torch_tpu=has_torch_tpu,
        accelerator=_accelerator_of_torch() if has_torch_tpu else None,
        asks_for_cpu=_is_on(os.environ.get(CPU, "")),
    )


def _accelerator_of_torch() -> str | None:
    import torch  # which imports torch_tpu, and that a device where a TPU is attached

    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def _misfit() -> str | None:
    """Return why torch_xla cannot be used: each release is built for the torch of its own minor version."""
    try:
        torch, torch_xla = version("torch"), version("torch_xla")
    except PackageNotFoundError:
        return None
    if torch.split(".")[:2] == torch_xla.split(".")[:2]:
        return None
    return f"torch_xla {torch_xla} is of another version than torch {torch}, and is left alone"


def _is_tpu(device: str) -> bool:
    try:
        vendor, number = (Path(device, name).read_text(encoding="utf-8").strip() for name in ("vendor", "device"))
    except OSError:  # unplugged meanwhile, or hidden
        return False
    return vendor == PCI_VENDOR and number in PCI_DEVICES


def _asked_device() -> str | None:
    """Return ``PJRT_DEVICE``; None if torch_xla set it, which sets "CPU" when it is imported and finds no TPU.

    The environment keeps the order in which variables were set: torch_xla sets this one last.
    """
    device = os.environ.get("PJRT_DEVICE")
    if device != "CPU" or "torch_xla" not in sys.modules:
        return device
    order = list(os.environ)
    others = [order.index(name) for name in SET_BY_TORCH_XLA if name in order]
    return device if order.index("PJRT_DEVICE") < max(others, default=0) else None


def _turn_xla_off() -> None:
    """Let transformers and accelerate train on plain torch too, in the whole process."""
    os.environ[_SWITCH] = "0"
    # Both take XLA wherever torch_xla is installed, and no argument says otherwise. Each reads the switch once, when
    # it is imported, and keeps its answer: so in what was imported before, both are corrected.
    transformers, accelerate = (
        sys.modules.get(name) for name in ("transformers.utils.import_utils", "accelerate.utils.imports")
    )
    if transformers is not None:
        transformers.USE_TORCH_XLA = "0"  # type: ignore[attr-defined]
        transformers.is_torch_xla_available.cache_clear()
    if accelerate is not None:
        accelerate._torch_xla_available = False  # type: ignore[attr-defined]
        accelerate.is_torch_xla_available.cache_clear()
