"""Runs Python in processes of their own, which need not import torch and transformers again.

A process holds one runtime and one set of devices, so many tests start others. Importing takes each of them some eight
seconds; so they are forks of a server, `python apart.py FOLDER`, that has imported everything and touched no device.
All processes of a test run share one for every environment that libraries read while they are imported. It ends when
the last of those that have used it does.
"""

import contextlib
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, Any

from places import ROOT, SUPPORT

ONLY = "IMPORTED_ONLY"  # the variable for a server that has imported nothing but this
READ_BY_IMPORTS = ("USE_TORCH_XLA", "PJRT_DEVICE", "HF_", "TF_CPP_", "GRPC_", ONLY)  # what variables begin with
IMPORTED = [
    "trl_tpu",
    "datasets",
    "peft",
    "transformers.models.llama.modeling_llama",
    "trl_tpu.trainer.reward_trainer",
]
IMPORTED_ON_XLA = ["torch_xla.core.xla_model", "torch_xla.distributed.spmd", "trl_tpu.runtime.xla"]
# each process that uses a server holds a shared lock on this file of its folder
USED = "used"
_TEST_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))[:8]
_lock = threading.Lock()


# ---- in the tests


def run(
    script: str, *words: str, timeout: float = 400, status: int | None = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder, or ``-c`` and code, with these words and variables; it has to end with the status.

    The variables are added to the environment's. A status of None may be any.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"} | variables
    file = script if script == "-c" else str(SUPPORT / script)
    process = python(file, *words, environment=environment, timeout=timeout)
    assert status in (None, process.returncode), process.stderr[-4000:]
    return process


def python(
    *words: str, environment: dict[str, str], folder: Path = ROOT, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    """Run `python words...`, a file, ``-m`` or ``-c``, as the leader of a session of its own in a folder.

    Raises:
        subprocess.TimeoutExpired: it took too long, and was killed with all that it had started.
    """
    key = sorted((name, value) for name, value in environment.items() if name.startswith(READ_BY_IMPORTS))
    with _lock:
        path, *_ = _server(tuple(key))
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


def cold(*words: str, environment: Mapping[str, str] = os.environ, **variables: str) -> str:
    """Run `python words...` in a process that imports everything anew, and return what it prints; it has to succeed.

    The variables are added to the environment.
    """
    added = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | variables
    command, environment = [sys.executable, *words], {**environment, **added}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def at_once(*commands: tuple[str, ...], **given: Any) -> list[subprocess.CompletedProcess[str]]:
    """`run` scripts, each with its words, that meet at a free port of this machine, until all have ended."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(lambda command: run(*command, **meet, **given), commands))


def become_rank(rank: str, count: str) -> None:
    """Tell this process what torchrun tells one of several."""
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@cache
def _server(variables: tuple[tuple[str, str], ...]) -> tuple[str, IO[str], subprocess.Popen[str] | None]:
    """Start a server, unless another process of this test run has.

    Returns:
        Its socket, the file whose lock keeps it, and the server itself where it was started here.
    """
    name = hashlib.sha256(repr(variables).encode()).hexdigest()[:8]
    folder = Path(tempfile.gettempdir(), f"trl-tpu-tests-{_TEST_RUN}-{name}")
    folder.mkdir(exist_ok=True)
    used = (folder / USED).open("w")
    fcntl.flock(used, fcntl.LOCK_SH)
    with (folder / "starting").open("w") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        server = None if (folder / "socket").exists() else _start(folder, dict(variables))
    return str(folder / "socket"), used, server


def _start(folder: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith(READ_BY_IMPORTS)}
    server = subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        env={**others, **variables, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None and server.stdout.readline() == "ready\n", "the server could not import"
    return server


# ---- in the server, and in its forks


def serve(folder: Path) -> dict[str, Any]:
    """Fork for every request, and return it in the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener, (folder / USED).open("w") as used:
        listener.bind(str(folder / "socket"))
        listener.listen()
        print("ready", flush=True)
        while True:
            if not select.select([listener], [], [], 1)[0]:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)  # the tests have ended
                    sys.exit()
                continue
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
    if ONLY in started_with:
        importlib.import_module(started_with[ONLY])
    else:
        for module in IMPORTED:
            importlib.import_module(module)
        from trl_tpu import runtime

        for module in IMPORTED_ON_XLA if runtime.choice().name == "xla" else ():
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # forks share what is imported, and do not look through it for garbage
    become(started_with, **serve(Path(sys.argv[1])))
