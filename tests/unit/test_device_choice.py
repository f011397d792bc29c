"""The device choice follows the environment, and transformers and accelerate choose the same device."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import subprocesses
from environment import ROOT

from trl_tpu.runtime.device_choice import Facts, choose

needs_torch_xla = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None, reason="torch_xla, which other libraries prefer, is not installed"
)
BOTH = {"has_torch_xla": True, "has_libtpu": True}
XLA_ONLY = {"has_torch_xla": True, "has_libtpu": False}
NEITHER = {"has_torch_xla": False, "has_libtpu": False}
TORCHTPU = {"tpu_chips": 4, "accelerator": "tpu"}
DEVICES = ("USE_TORCH_XLA", "PJRT_DEVICE", "CPU_NUM_DEVICES")


CHOICES = [
    # an installed torch_xla alone is not chosen
    (Facts(**BOTH), "native", "PJRT_DEVICE=CPU"),
    (Facts(**NEITHER), "native", "torch_xla is not installed"),
    # a TPU
    (Facts(**BOTH, tpu_chips=4), "xla", "USE_TORCH_XLA=0"),
    (Facts(**XLA_ONLY, tpu_chips=4), "native", "libtpu is not installed"),
    (Facts(**NEITHER, tpu_chips=4), "native", "torch_xla is not installed"),
    # a TPU that is torch's accelerator (TorchTPU)
    (Facts(**NEITHER, **TORCHTPU), "torchtpu", "ACCELERATE_USE_CPU=1"),
    (Facts(**BOTH, **TORCHTPU, pjrt_device="TPU", switch="0"), "torchtpu", "torch's accelerator"),
    (Facts(**NEITHER, **TORCHTPU, asks_for_cpu=True), "native", "ACCELERATE_USE_CPU"),
    (Facts(**NEITHER, accelerator="cuda"), "native", "no TPU is attached"),
    # requested by PJRT_DEVICE
    (Facts(**XLA_ONLY, pjrt_device="CPU"), "xla", "PJRT_DEVICE=CPU"),
    (Facts(**BOTH, pjrt_device="TPU", tpu_chips=4), "xla", "PJRT_DEVICE=TPU"),
    (Facts(**BOTH, version_mismatch="of another version", tpu_chips=4), "native", "of another version"),
    (Facts(**NEITHER, pjrt_device="CPU"), "native", "PJRT_DEVICE=CPU is set, but torch_xla is not installed"),
    # USE_TORCH_XLA
    (Facts(**BOTH, tpu_chips=4, switch="0"), "native", "USE_TORCH_XLA=0"),
    (Facts(**BOTH, pjrt_device="CPU", switch="false"), "native", "USE_TORCH_XLA=false"),
    (Facts(**BOTH, pjrt_device="CPU", switch="1"), "xla", "PJRT_DEVICE=CPU"),
    (Facts(**BOTH, switch="1"), "native", "no TPU is attached"),
]


@pytest.mark.parametrize(("facts", "name", "reason"), CHOICES)
def test_runtime_is_chosen_by_devices_and_environment(facts: Facts, name: str, reason: str) -> None:
    choice = choose(facts)
    assert choice.name == name and reason in choice.reason


def run(code: str, *, transformers_first: bool = False, **environment: str) -> str:
    """Return the output of a process with only the device variables in ``environment``.

    Args:
        transformers_first: Import transformers before trl_tpu, with torch_xla installed.
    """
    plain = {name: value for name, value in os.environ.items() if name not in DEVICES}
    if not transformers_first:
        return subprocesses.run_without_server("-c", code, environment=plain, **environment)
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", subprocesses.ONLY: "transformers.trainer"}
    done = subprocesses.python("-c", code, environment=plain | environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


SAY = """
import accelerate.utils, transformers.utils
from trl_tpu import runtime
said = {transformers.utils.is_torch_xla_available(), accelerate.utils.is_torch_xla_available()}
print(runtime.choice().name, *said)
"""
BEFORE = """
import accelerate.utils, transformers.trainer, transformers.utils
assert transformers.utils.is_torch_xla_available() and accelerate.utils.is_torch_xla_available()
"""


@needs_torch_xla
def test_other_libraries_choose_the_same_device() -> None:
    """A device that torch_xla sets on its own is ignored. `tests/xla` runs with a requested device."""
    first = "import sys, trl_tpu; assert 'torch' not in sys.modules"
    assert run(f"{first}\n{SAY}").splitlines()[-1] == "native False"
    named = "import os; assert os.environ['PJRT_DEVICE'] == 'CPU'"
    assert run(f"{BEFORE}\n{named}\n{SAY}", transformers_first=True).splitlines()[-1] == "native False"


@needs_torch_xla
def test_requested_device_counts_though_torch_xla_is_imported_first() -> None:
    """The process is started with the variable. A later assignment cannot be told from torch_xla's own."""
    plain = {name: value for name, value in os.environ.items() if name not in DEVICES}
    words = [sys.executable, "-c", f"{BEFORE}\n{SAY}"]
    asked = {"PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=plain | asked, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "xla True"


@needs_torch_xla
def test_installed_torch_xla_leaves_a_gpu_in_use(tmp_path: Path) -> None:
    """This machine has no GPU, so torch's functions are replaced to report one."""
    code = f"""
import torch
torch.cuda.is_available = torch.cuda.is_bf16_supported = lambda *_, **__: True
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda _: None
torch.cuda.get_device_name = lambda *_: "a GPU"
from trl_tpu import RewardConfig, runtime
args = RewardConfig({str(tmp_path)!r}, report_to="none")
print(args.device, args.bf16, runtime.choice().name, runtime.current().topology().description, sep=", ")
"""
    assert run(code, transformers_first=True).splitlines()[-1] == "cuda:0, True, native, a GPU"


@needs_torch_xla
def test_devices_started_too_early_are_rejected_with_the_fix() -> None:
    code = """
from transformers import TrainingArguments
print(TrainingArguments("nowhere", report_to="none").device)
try:
    import trl_tpu
except RuntimeError as error:
    print(error)
"""
    device, error = run(code, transformers_first=True).splitlines()[-2:]
    assert device == "xla:0" and "USE_TORCH_XLA=0" in error and "PJRT_DEVICE=CPU" in error


def test_torch_xla_of_another_version_is_not_imported(tmp_path: Path) -> None:
    """Importing it fails, and transformers would import any installed torch_xla."""
    (tmp_path / "torch_xla.py").write_text("raise ImportError('undefined symbol')", encoding="utf-8")
    (tmp_path / "torch_xla-1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torch_xla\nVersion: 1.0\n"
    (tmp_path / "torch_xla-1.0.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import trl_tpu, transformers.trainer"
    code = f"{before}\n{SAY}\nprint(runtime.choice().reason)"
    choice, reason = run(code, PJRT_DEVICE="CPU", USE_TORCH_XLA="1").splitlines()[-2:]
    assert choice == "native False" and "torch_xla 1.0" in reason
