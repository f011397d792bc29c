"""Check a GPU in at most ten minutes, without a network: `make gpu-check`, or `python -m tests.gpu.check`.

Each part is a process with a time limit that prints rows. A part that fails or takes too long keeps its rows, and the
others go on. The table of all rows is printed, and written to gpu.md in the folder of `--output`, with a log per part.
Without a GPU all parts run on the CPU in small sizes: a dry run.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trl_tpu.runtime import current
from trl_tpu.scripts.selfcheck import package_versions

from . import IS_DRY

#: Time limits in seconds. Checks run at the same time; parts that measure speed follow one after another.
CHECKS = {"selfcheck": 200, "training": 200, "attention": 150}
SPEED = {"speed SmolLM2-135M": 80, "speed Qwen3-0.6B": 110, "speed Qwen3-4B": 160}
VERDICTS = {True: "ok", False: "**FAILED**", None: ""}


def run(part: str, seconds: float, folder: Path) -> list[str]:
    """Run a part, and return its rows of the table; if it does not succeed, the last row says why."""
    log, results = folder / f"{part.replace(' ', '-')}.log", folder / "selfcheck.json"
    own = ["trl_tpu.cli", "selfcheck", "--output", str(results)]
    words = own if part == "selfcheck" else f"tests.gpu.{part}".split()
    with log.open("w") as file:
        streams: Any = {"stdout": file, "stderr": file}
        process = subprocess.Popen([sys.executable, "-m", *words], **streams, start_new_session=True)
        try:
            end = f"exit status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            end = f"ended after {seconds} s"
    lines = log.read_text(errors="replace").splitlines()
    rows = [json.loads(line) for line in lines if line.startswith('{"check"')]
    if part == "selfcheck" and results.exists():
        rows = json.loads(results.read_text())["lines"]
    if process.poll() != 0:
        rows.append({"check": "the whole part", "result": f"{end}; {' '.join(lines[-1:])[:200]}", "passed": False})
    print(f"{part}: {end}, {len(rows)} rows", flush=True)
    return [f"| {part} | {row['check']} | {row['result']} | {VERDICTS[row['passed']]} |" for row in rows]


def main(parts: list[str], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items() if version)
    title = f"{current().topology().description}{', a dry run' * IS_DRY}; CUDA {torch.version.cuda}; {versions}"
    rows = [title, "", "| part | check | result | |", "|---|---|---|---|"]
    for group, at_once in ((CHECKS, 1 if IS_DRY else len(CHECKS)), (SPEED, 1)):
        chosen = [(part, 1000 if IS_DRY else limit, folder) for part, limit in group.items() if part in parts]
        with ThreadPoolExecutor(at_once) as pool:
            for found in pool.map(lambda each: run(*each), chosen):
                rows += found
                (folder / "gpu.md").write_text("\n".join([*rows, ""]))  # now: the lane may be ended at any time
    failed = sum(VERDICTS[False] in row for row in rows)
    print("\n".join(["", *rows, f"{failed} of {len(rows) - 4} rows failed. Table and logs: {folder}"]))
    return bool(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--parts", nargs="*", default=[*CHECKS, *SPEED], choices=[*CHECKS, *SPEED])
    options = parser.parse_args()
    sys.exit(main(options.parts, options.output))
