"""Run Python in subprocesses that need not import torch and transformers again.

A process holds one runtime and one set of devices, so many tests start subprocesses. Importing takes each of them
about eight seconds. They are therefore forks of a server, `python subprocesses.py FOLDER`, that has imported
everything and touched no device. All processes of a test run share one server for each environment that libraries
read at import. A server ends when the last process that used it does.
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
from typing import IO, TYPE_CHECKING, Any

from environment import ROOT, SUPPORT

if TYPE_CHECKING:
    import pytest

ONLY = "IMPORTED_ONLY"  # names the only module that a server imports
READ_BY_IMPORTS = ("USE_TORCH_XLA", "PJRT_DEVICE", "HF_", "TF_CPP_", "GRPC_", ONLY)  # prefixes of variables
PARALLEL_COMPILES = min(4, os.cpu_count() or 1)
"""Number of processes that trace and compile concurrently. Each needs 1 GB of memory."""
IMPORTED = ["trl_tpu.trainer.reward_trainer", "datasets", "peft", "transformers.models.llama.modeling_llama"]
IMPORTED_ON_XLA = ["torch_xla.core.xla_model", "torch_xla.distributed.spmd", "trl_tpu.runtime.xla"]
# each process that uses a server holds a shared lock on this file in the server's folder
USED = "used"
_TEST_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))[:8]
_lock = threading.Lock()


# ---- in the tests


def run(
    script: str, *words: str, timeout: float = 400, status: int | None = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder, or ``-c`` and code, with command-line words.

    Args:
        status: Expected exit status; None accepts any.
        variables: Additional environment variables.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"} | variables
    file = script if script == "-c" else str(SUPPORT / script)
    process = python(file, *words, environment=environment, timeout=timeout)
    assert status in (None, process.returncode), process.stderr[-4000:]
    return process


def python(
    *words: str, environment: dict[str, str], folder: Path = ROOT, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    """Run `python words...` (a file, ``-m`` or ``-c``) in a folder, as the leader of its own session.

    Raises:
        subprocess.TimeoutExpired: The process took too long. It was killed with every process it had started.
    """
    if environment.get("CUDA_VISIBLE_DEVICES"):  # a fork cannot use CUDA if its parent has looked for devices
        command, output = [sys.executable, *words], {"capture_output": True, "text": True, "timeout": timeout}
        return subprocess.run(command, env=environment, cwd=folder, **output)  # type: ignore[call-overload]
    key = sorted((name, value) for name, value in environment.items() if name.startswith(READ_BY_IMPORTS))
    with _lock:
        path, *_ = _server(tuple(key))
    with tempfile.TemporaryDirectory() as outputs, socket.socket(socket.AF_UNIX) as connection:
        files = [Path(outputs, name) for name in ("stdout", "stderr")]
        connection.connect(path)
        request = {"words": words, "environment": environment, "folder": str(folder), "files": [*map(str, files)]}
        connection.sendall(json.dumps(request).encode() + b"\n")
        connection.settimeout(timeout)
        with connection.makefile() as replies:
            process = int(replies.readline())
            try:
                status = int(replies.readline())
            except TimeoutError:
                os.killpg(process, signal.SIGKILL)
                raise subprocess.TimeoutExpired(words, timeout) from None
        return subprocess.CompletedProcess(words, status, *(path.read_text() for path in files))


def run_without_server(*words: str, environment: Mapping[str, str] = os.environ, **variables: str) -> str:
    """Run `python words...` in a new process that imports everything itself, and return its output; it must succeed.

    ``variables`` are added to the environment.
    """
    added = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | variables
    command, environment = [sys.executable, *words], {**environment, **added}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout


def run_ranks(*commands: tuple[str, ...], **options: Any) -> list[subprocess.CompletedProcess[str]]:
    """Run scripts, each with its words, concurrently as ranks that meet at a free port of this machine."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with ThreadPoolExecutor(len(commands)) as pool:
        ranks = [pool.submit(run, *command, **rendezvous, **options) for command in commands]
    # of all ranks: one that has ended closes the connections of the others
    if errors := [error for rank in ranks if isinstance(error := rank.exception(), Exception)]:
        raise ExceptionGroup("ranks failed", errors)
    return [rank.result() for rank in ranks]


def become_rank(rank: str, count: str) -> None:
    """Set the environment variables that torchrun sets for a rank."""
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def selected_cases(request: "pytest.FixtureRequest", parameter: str, *more: str) -> list[Any]:
    """Return the values of a parameter in the tests of the fixture's file that will run, each once, in their order.

    A fixture can so run all selected cases in few processes. For several parameters return tuples of their values.
    """
    tests = [item for item in request.session.items if item.path == request.path]
    cases = [test.callspec.params for test in tests if hasattr(test, "callspec")]
    names = (parameter, *more)
    values = [tuple(case[name] for name in names) for case in cases if set(names) <= case.keys()]
    return list(dict.fromkeys(values if more else (value for (value,) in values)))


@cache
def _server(variables: tuple[tuple[str, str], ...]) -> tuple[str, IO[str], subprocess.Popen[str] | None]:
    """Start a server, unless another process of this test run has done so.

    Returns:
        The path of its socket, the locked file that keeps it alive, and the server process if it was started here.
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
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    environment = {**others, **variables, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen([sys.executable, __file__, str(folder)], env=environment, **streams)
    assert server.stdout is not None and server.stdout.readline() == "ready\n", "the server failed to import"
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
    """Read a request, fork again, send the fork's process id and exit status, and return the request in the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile() as stream:
        request = json.loads(stream.readline())
    process = os.fork()
    if process:
        connection.sendall(f"{process}\n".encode())
        connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\n".encode())
        os._exit(0)
    return request


def become(
    started_with: dict[str, str], words: list[str], environment: dict[str, str], folder: str, files: list[str]
) -> None:
    """Turn this process into the requested one."""
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
    gc.freeze()  # forks share the imported objects and do not search them for garbage
    become(started_with, **serve(Path(sys.argv[1])))
