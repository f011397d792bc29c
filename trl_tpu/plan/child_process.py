"""Calls functions of this package in a process of their own: ``python -m trl_tpu.plan.child_process FUNCTION FILE``.

torch_xla fixes once what a process computes on, and libtpu may end the process that it compiles in.
"""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

WITHOUT_A_TPU = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""Environment of these processes: jax would otherwise look for a TPU; and several may use libtpu at once."""


class Crashed(RuntimeError):
    """A process ended without an error of its own: a fault in a library, or killed for the machine's memory."""


def call_in_child(function: str, *given: Any, environment: Mapping[str, str]) -> Any:
    """Return what a function of this room returns, called in a process of its own.

    Args:
        function: As "module:name".
        given: Its arguments, which are pickled, and so is what it returns.
        environment: Variables of that process, beside this one's.

    Raises:
        Crashed: The process ended before the function did.
        RuntimeError: The function raised; with its message.
    """
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **WITHOUT_A_TPU, **environment, "PYTHONPATH": paths}
    with tempfile.NamedTemporaryFile() as file:
        exchange = Path(file.name)
        exchange.write_bytes(pickle.dumps(given))
        command = [sys.executable, "-m", __name__, function, file.name]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            how = signal.strsignal(-process.returncode) if process.returncode < 0 else f"status {process.returncode}"
            raise Crashed(f"{function} crashed: {how}. It printed last:\n{process.stderr.strip()[-4000:]}")
        result, message = pickle.loads(exchange.read_bytes())
    if message:
        raise RuntimeError(message)
    return result


def main() -> None:
    (module, _, name), exchange = sys.argv[1].partition(":"), Path(sys.argv[2])
    try:
        called = attrgetter(name)(importlib.import_module(f"{__package__}.{module}"))
        result, message = called(*pickle.loads(exchange.read_bytes())), ""
    except Exception as error:  # compilers' are long, and begin with what matters
        result, message = None, f"{type(error).__name__}: {error}"[:4000]
    exchange.write_bytes(pickle.dumps((result, message)))


if __name__ == "__main__":
    main()
