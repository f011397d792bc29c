"""Functions of this package in processes of their own: ``python -m trl_tpu.plan.apart FUNCTION FILE``.

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
"""What these processes are told. jax would otherwise look for a TPU; and several may use libtpu at once."""


class Crashed(RuntimeError):
    """A process ended without a word of its own: a fault in a library, or killed for the machine's memory."""


def call_apart(function: str, *given: Any, environment: Mapping[str, str]) -> Any:
    """What a function of this package returns, called in a process of its own.

    Args:
        function: As "module:name".
        given: Its arguments, which are pickled, and so is what it returns.

    Raises:
        Crashed: If the process ended before the function did.
        RuntimeError: If the function raises; with what it says.
    """
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **WITHOUT_A_TPU, **environment, "PYTHONPATH": paths}
    with tempfile.NamedTemporaryFile() as file:
        exchange = Path(file.name)
        exchange.write_bytes(pickle.dumps(given))
        command = [sys.executable, "-m", __name__, f"{__package__}.{function}", file.name]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            how = signal.strsignal(-process.returncode) if process.returncode < 0 else f"status {process.returncode}"
            raise Crashed(f"{function} crashed: {how}. It printed last:\n{process.stderr.strip()[-4000:]}")
        result, said = pickle.loads(exchange.read_bytes())
    if said:
        raise RuntimeError(said)
    return result


def main() -> None:
    function, exchange = sys.argv[1], Path(sys.argv[2])
    module, _, name = function.partition(":")
    try:
        called = attrgetter(name)(importlib.import_module(module))
        result, said = called(*pickle.loads(exchange.read_bytes())), ""
    except Exception as error:  # compilers' are long, and begin with what matters
        result, said = None, f"{type(error).__name__}: {error}"[:4000]
    exchange.write_bytes(pickle.dumps((result, said)))


if __name__ == "__main__":
    main()
