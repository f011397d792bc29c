"""Runs the scripts of this folder in processes of their own, which need not import torch and transformers again.

A process holds one runtime and one set of devices, so many tests start others. Importing takes each of them some eight
seconds; so they are forks of a server, multiprocessing's own, that has imported everything and touched no device.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import wait
from pathlib import Path

from places import ROOT, SUPPORT

_RUNTIME = "USE_TORCH_XLA"  # read when transformers is imported
_XLA = ["torch_xla.core.xla_model", "torch_xla.distributed.spmd", "trl_tpu.runtime.xla"]
_lock = threading.Lock()  # starting one process also looks after those that other threads wait for
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    ["datasets", "peft", "transformers.models.llama.modeling_llama", "trl_tpu.trainer.reward_trainer"]
    + (_XLA if os.environ.get(_RUNTIME) != "0" else [])
)


def run(script: str, *words: str, timeout: float = 400, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script with these words on its command line and these variables beside those of the environment."""
    command = [str(SUPPORT / script), *words]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | variables
    if environment.get(_RUNTIME, "1") != os.environ.get(_RUNTIME, "1"):  # the server has imported for another
        python = [sys.executable, *command]
        return subprocess.run(python, env=environment, capture_output=True, text=True, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = _forks.Process(target=_run, args=(command, environment, outputs))
        with _lock:
            process.start()
        wait([process.sentinel], timeout)
        with _lock:
            process.join(0)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, process.exitcode, *(path.read_text() for path in outputs))


def _run(command: list[str], environment: dict[str, str], outputs: list[Path]) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(environment)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
