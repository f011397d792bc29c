"""Choose the backend before torch or transformers are imported."""

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

#: libtpu flags that the trainer adds. Each flag is from a published recipe that was timed on TPUs.
FLAGS: Mapping[str, str] = {
    # XLA can compute products with a sharded weight piece by piece, while the weight moves around a ring of devices.
    # This flag makes it all-gather weights instead, concurrently with other work, as in MaxText's recipes for v6e:
    # DISABLE_COLLECTIVE_MATMUL in https://github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}

_TORCH_XLA_FLAGS: Mapping[str, str] = {
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}
#: libtpu flags that torch_xla 2.9 adds when it is imported on a TPU, and flags that it adds only on TPU v5.
_TORCH_XLA_V5_FLAGS = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}


def flags_for(topology: str, given: str = "") -> str:
    """Return the libtpu flags for training on ``topology``, such as v5e:2x4, including the user's ``given`` flags."""
    v5_flags = _TORCH_XLA_V5_FLAGS if topology.startswith("v5") else {}
    return with_flags(given, {**_TORCH_XLA_FLAGS, **v5_flags, **FLAGS})


def set_flags() -> None:
    """Add `FLAGS` to this process's environment. libtpu reads it when the first device is used.

    Only flags that the installed libtpu supports are added; none without libtpu.
    """
    # torch_xla sets these variables to its choice of libtpu
    library = os.environ.get("TPU_LIBRARY_PATH") or os.environ.get("PTXLA_TPU_LIBRARY_PATH")
    if library and Path(library).is_file():
        os.environ[VARIABLE] = with_flags(os.environ.get(VARIABLE, ""), supported_flags(FLAGS, Path(library)))


def supported_flags(flags: Mapping[str, str], library: Path) -> dict[str, str]:
    """Return the flags with names that occur in a libtpu library: libtpu ends the process for unknown flags."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {name: value for name, value in flags.items() if content.find(name.encode()) >= 0}


def with_flags(given: str, flags: Mapping[str, str]) -> str:
    """Add ``flags`` to the flags in ``given``. Values in ``given`` take precedence."""
    names = {word.lstrip("-").partition("=")[0] for word in given.split()}
    return " ".join([*given.split(), *(f"--{name}={value}" for name, value in flags.items() if name not in names)])


#: PCI vendor and device numbers that torch_xla recognizes as TPUs (torch_xla._internal.tpu).
PCI_VENDOR = "0x1ae0"
PCI_DEVICES = frozenset({"0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076"})

_SWITCH = "USE_TORCH_XLA"
CPU = "ACCELERATE_USE_CPU"
_INSTALL = 'pip install -e ".[tpu]"'


@dataclass(frozen=True)
class Facts:
    """Facts about the environment that decide the choice of the backend.

    Attributes:
        tpu_chips: Number of TPU chips of this host.
        pjrt_device: The variable ``PJRT_DEVICE``, if the user set it.
        switch: The variable ``USE_TORCH_XLA``, if the user set it.
        version_mismatch: Reason why the installed torch_xla cannot be used; None if it can.
        accelerator: Type of torch's current accelerator; None without torch_tpu.
        asks_for_cpu: Whether the user sets accelerate to the CPU.
    """

    has_torch_xla: bool
    has_libtpu: bool
    tpu_chips: int = 0
    pjrt_device: str | None = None
    switch: str | None = None
    version_mismatch: str | None = None
    accelerator: str | None = None
    asks_for_cpu: bool = False


@dataclass(frozen=True)
class Choice:
    """The chosen runtime, and the reason for the log, with a hint for changing the choice."""

    name: Literal["xla", "torchtpu", "native"]
    reason: str


def choose(facts: Facts) -> Choice:
    """Choose the runtime by the first rule that applies."""
    if facts.accelerator == "tpu" and facts.asks_for_cpu:
        return Choice("native", f"{CPU} is set")
    if facts.accelerator == "tpu":
        return Choice("torchtpu", f"torch's accelerator is a TPU, through TorchTPU; {CPU}=1 would choose the CPU")
    if facts.switch is not None and not _is_on(facts.switch):
        return Choice("native", f"{_SWITCH}={facts.switch} turns PyTorch/XLA off")
    if facts.version_mismatch is not None:
        return Choice("native", facts.version_mismatch)
    asked = "a TPU is attached" if facts.tpu_chips else None
    if facts.pjrt_device:
        asked = f"PJRT_DEVICE={facts.pjrt_device} is set"
    missing = "libtpu" if facts.has_torch_xla else "torch_xla"
    if asked and facts.has_torch_xla and (facts.pjrt_device or facts.has_libtpu):
        return Choice("xla", f"{asked}; {_SWITCH}=0 would choose plain torch")
    if asked:
        return Choice("native", f"{asked}, but {missing} is not installed, and TorchTPU finds no TPU: {_INSTALL}")
    if not facts.has_torch_xla:
        return Choice("native", "no TPU is attached, and torch_xla is not installed")
    return Choice("native", "no TPU is attached; PJRT_DEVICE=CPU would choose PyTorch/XLA on the CPU")


def _is_on(value: str) -> bool:
    return value.upper() in ("1", "ON", "YES", "TRUE")


class _State:
    """The choice of this process.

    Attributes:
        set_switch: Whether `settle` set ``USE_TORCH_XLA``.
    """

    choice: Choice | None = None
    set_switch = False


def settle() -> None:
    """Choose the backend by the current environment, at the import of this package and again after later changes.

    After transformers is imported, the choice is final: transformers reads the environment only once.

    Raises:
        RuntimeError: Plain torch is chosen, but XLA was already started.
    """
    if _State.choice is not None and "transformers" in sys.modules:
        return
    if _State.set_switch and os.environ.get(_SWITCH) == "0":
        del os.environ[_SWITCH]
    facts = _facts()
    chosen = choose(facts)
    # A torch_xla of the wrong version is always turned off: with the switch on, transformers would fail to import it.
    asked = facts.switch is not None and (facts.version_mismatch is None or not _is_on(facts.switch))
    _State.set_switch = chosen.name != "xla" and facts.has_torch_xla and not asked
    if facts.asks_for_cpu:  # the variable may be inherited from a parent process that trains on TorchTPU
        os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    if _State.set_switch:
        torch_xla = sys.modules.get("torch_xla")
        if torch_xla is not None and torch_xla._XLAC._xla_runtime_is_initialized():
            raise RuntimeError(
                f"This process should train on plain torch, since {chosen.reason}. But accelerate has started "
                "XLA's devices. Import trl_tpu before creating an Accelerator or TrainingArguments, or set "
                f"{_SWITCH}=0 in the environment. To train on PyTorch/XLA instead, set PJRT_DEVICE=CPU."
            )
        _turn_xla_off()
    _State.choice = chosen


def choice() -> Choice:
    """Return the chosen runtime of this process."""
    assert _State.choice is not None  # set at the import of this package
    return _State.choice


def _facts() -> Facts:
    return Facts(
        has_torch_xla=find_spec("torch_xla") is not None,
        version_mismatch=_misfit(),
        has_libtpu="TPU_LIBRARY_PATH" in os.environ or find_spec("libtpu") is not None,
        tpu_chips=sum(map(_is_tpu, glob.glob("/sys/bus/pci/devices/*"))),
        pjrt_device=_asked_device(),
        switch=os.environ.get(_SWITCH),
        accelerator=_accelerator_of_torch() if find_spec("torch_tpu") is not None else None,
        asks_for_cpu=_is_on(os.environ.get(CPU, "")),
    )


def _accelerator_of_torch() -> str | None:
    import torch  # its import loads torch_tpu, and torch_tpu registers an attached TPU

    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def _misfit() -> str | None:
    """Return why torch_xla cannot be used, or None. Each release works only with the same minor version of torch."""
    try:
        torch, torch_xla = version("torch"), version("torch_xla")
    except PackageNotFoundError:
        return None
    fits = torch.split(".")[:2] == torch_xla.split(".")[:2]
    return None if fits else f"torch_xla {torch_xla} does not match torch {torch} and is not used"


def _is_tpu(device: str) -> bool:
    try:
        vendor, number = (Path(device, name).read_text(encoding="utf-8").strip() for name in ("vendor", "device"))
    except OSError:  # the device was removed or is hidden
        return False
    return vendor == PCI_VENDOR and number in PCI_DEVICES


def _asked_device() -> str | None:
    """Return ``PJRT_DEVICE``; None if torch_xla may have set it. Without a TPU, importing torch_xla sets it to "CPU".

    Once torch_xla is imported, a value "CPU" counts only if this process was started with it.
    """
    device = os.environ.get("PJRT_DEVICE")
    if device != "CPU" or "torch_xla" not in sys.modules:
        return device
    return device if b"PJRT_DEVICE=CPU" in Path("/proc/self/environ").read_bytes().split(b"\0") else None


def _turn_xla_off() -> None:
    """Let transformers and accelerate use plain torch too, in the whole process."""
    os.environ[_SWITCH] = "0"
    # Both libraries use XLA if torch_xla is installed, and have no argument against that. They read the switch once,
    # at import. If they are already imported, their stored values are corrected here.
    transformers, accelerate = (
        sys.modules.get(name) for name in ("transformers.utils.import_utils", "accelerate.utils.imports")
    )
    if transformers is not None:
        transformers.USE_TORCH_XLA = "0"  # type: ignore[attr-defined]
        transformers.is_torch_xla_available.cache_clear()
    if accelerate is not None:
        accelerate._torch_xla_available = False  # type: ignore[attr-defined]
        accelerate.is_torch_xla_available.cache_clear()
