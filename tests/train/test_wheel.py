"""The wheel trains, scores and reports in a fresh environment, away from the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from environment import ROOT

Run = Callable[..., str]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs `trl-tpu` of a new environment, which reads this one's dependencies only."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"USE_TORCH_XLA": "0"}

    def run(*words: object) -> str:
        process = subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return process.stdout

    pip = (sys.executable, "-m", "pip", "--quiet")
    for name in ("setup.cfg", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "trl_tpu", folder / "trl_tpu")  # a build in the checkout would leave files there
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder)
    shutil.rmtree(folder / "trl_tpu")
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    run(*pip, "--python", python, "install", "--no-deps", wheel)
    assert Path(run(python, "-c", "import trl_tpu; print(trl_tpu.__file__)").strip()).is_relative_to(packages)
    return lambda *words: run(folder / "venv" / "bin" / "trl-tpu", *words)


def test_installed_wheel_trains_scores_and_reports(command: Run, tmp_path: Path) -> None:
    out, rows, scored = tmp_path / "run", tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    data = ("--model_name_or_path", "synthetic:tiny", "--dataset_name", "synthetic:numbers")
    settings = ("--max_steps", 2, "--eval_strategy", "steps", "--eval_steps", 2, "--report_to", "none")
    command("reward", *data, *settings, "--output_dir", out)
    rows.write_text(json.dumps({"prompt": "Which is larger, 12 or 30?", "chosen": " 30", "rejected": " 12"}))
    command("score", "--model_name_or_path", out, "--dataset_name", rows, "--output", scored)
    assert {"reward_chosen", "reward_rejected"} <= json.loads(scored.read_text()).keys()
    assert "index.html" in command("report", out)
