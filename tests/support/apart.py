"""Runs Python in processes of their own, which need not import torch and transformers again.

A process holds one runtime and one set of devices, so many tests start others. Importing takes each of them some eight
seconds; so they are forks of a server, `python apart.py SOCKET`, that has imported everything and touched no device.
There is one for every environment that libraries read while they are imported. It ends with the tests.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

from places import ROOT, SUPPORT

READ_BY_IMPORTS = ("USE_TORCH_XLA", "PJRT_DEVICE", "HF_")  # what variables begin with
IMPORTED = [
    "trl_tpu",
    "datasets",
    "peft",
    "transformers.models.llama.modeling_llama",
    "trl_tpu.trainer.reward_trainer",
]
IMPORTED_ON_XLA = ["torch_xla.core.xla_model", "torch_xla.distributed.spmd", "trl_tpu.runtime.xla"]
_lock = threading.Lock()


# ---- in the tests


def run(script: str, *words: str, timeout: float = 400, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder with these words, and these variables beside those of the environment."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | variables
    return python(str(SUPPORT / script), *words, environment=environment, timeout=timeout)


def python(
    *words: str, environment: dict[str, str], folder: Path = ROOT, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    """Run `python words...`, a file, ``-m`` or ``-c``, as the leader of a session of its own in a folder.

    Raises:
        subprocess.TimeoutExpired: it took too long, and was killed with all that it had started.
    """
    key = sorted((name, value) for name, value in environment.items() if name.startswith(READ_BY_IMPORTS))
    with _lock:
        path, _ = _server(tuple(key))
    with tempfile.TemporaryDirectory() as outputs, socket.socket(socket.AF_UNIX) as connection:
        files = [Path(outputs, name) for name in ("stdout", "stderr")]
        connection.connect(path)
        request = {"words": words, "environment": environment, "folder": str(folder), "files": [*map(str, files)]}
        connection.sendall(json.dumps(request).encode() + b"\n")
        connection.settimeout(timeout)
        with connection.makefile() as told:
            process = int(told.readline())
            try:
                status = int(told.readline())
            except TimeoutError:
                os.killpg(process, signal.SIGKILL)
                raise subprocess.TimeoutExpired(words, timeout) from None
        return subprocess.CompletedProcess(words, status, *(path.read_text() for path in files))


@cache
def _server(variables: tuple[tuple[str, str], ...]) -> tuple[str, subprocess.Popen[str]]:
    """Start a server, and return its socket and its process, which ends when nobody holds it any more."""
    path = str(Path(tempfile.mkdtemp(), "socket"))
    others = {name: value for name, value in os.environ.items() if not name.startswith(READ_BY_IMPORTS)}
    server = subprocess.Popen(
        [sys.executable, __file__, path],
        env={**others, **dict(variables), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,  # it ends when this is closed
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None and server.stdout.readline() == "ready\n", "the server could not import"
    return path, server


# ---- in the server, and in its forks


def serve(path: str) -> dict[str, Any]:
    """Fork for every request, and return it in the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([sys.stdin, listener], [], [])
            if sys.stdin in readable:  # the tests have ended
                sys.exit()
            with listener.accept()[0] as connection:
                if os.fork() == 0:
                    return request_of(connection)


def request_of(connection: socket.socket) -> dict[str, Any]:
    """Read a request, fork once more, tell the fork's process and status, and return the request in the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile() as asked:
        request = json.loads(asked.readline())
    process = os.fork()
    if process:
        connection.sendall(f"{process}\n".encode())
        connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\n".encode())
        os._exit(0)
    return request


def become(
    started_with: dict[str, str], words: list[str], environment: dict[str, str], folder: str, files: list[str]
) -> None:
    """Do what is asked for, as the whole of this process."""
    os.setsid()
    for descriptor, path in enumerate(["/dev/null", *files]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    set_by_imports = {name: value for name, value in os.environ.items() if name not in started_with}
    os.environ.clear()
    os.environ.update(set_by_imports | environment)
    os.chdir(folder)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    match words:
        case ["-c", code, *arguments]:
            sys.argv = ["-c", *arguments]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case ["-m", module, *arguments]:
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [file, *_]:
            sys.argv = words
            sys.path.insert(0, str(Path(file).parent))
            runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    started_with = dict(os.environ)
    for module in IMPORTED:
        importlib.import_module(module)
    from trl_tpu import runtime

    for module in IMPORTED_ON_XLA if runtime.choice().name == "xla" else ():
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # forks share what is imported, and do not look through it for garbage
    become(started_with, **serve(sys.argv[1]))
