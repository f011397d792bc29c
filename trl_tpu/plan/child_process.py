"""Call functions of this package in a process of their own: ``python -m trl_tpu.plan.child_process FILE``.

torch_xla fixes once what a process computes on, and libtpu may end the process that it compiles in.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WITHOUT_A_TPU = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""Environment of these processes: jax would otherwise look for a TPU; and several may use libtpu at once."""


def call_in_child(function: Callable[..., Any], *given: Any, environment: Mapping[str, str]) -> Any:
    """Return what ``function`` returns, called in a process of its own.

    Args:
        function: A module's function. It, its arguments and its result are pickled.
        given: Its arguments.
        environment: Variables of that process, beside this one's.

    Raises:
        RuntimeError: The function raised, with its message; or the process ended before, for a fault in a library or
            the machine's memory.
    """
    # a model's own classes are pickled by name: the child must find their modules too
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **WITHOUT_A_TPU, **environment}
    with tempfile.NamedTemporaryFile() as file:
        exchange = Path(file.name)
        exchange.write_bytes(pickle.dumps((function, given)))
        process = subprocess.run(
            [sys.executable, "-m", __name__, file.name], env=environment, capture_output=True, text=True
        )
        if process.returncode:
            raise RuntimeError(f"It ended with status {process.returncode}: {process.stderr.strip()[-4000:]}")
        result, message = pickle.loads(exchange.read_bytes())
    if message:
        raise RuntimeError(message)
    return result


def main(exchange: Path) -> None:
    function, given = pickle.loads(exchange.read_bytes())
    try:
        result, message = function(*given), ""
    except Exception as error:  # compilers' are long, and begin with what matters
        result, message = None, f"{type(error).__name__}: {error}"[:4000]
    exchange.write_bytes(pickle.dumps((result, message)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
