"""`trl-tpu selfcheck` passes on plain torch, and a wrong kernel on the device fails it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from environment import ROOT

from trl_tpu.scripts import selfcheck

#: A sitecustomize module: it makes attention in packed rows wrong, before anything else is imported.
WRONG_KERNEL = """
import trl_tpu.modeling.forward as forward
attend = forward.attend_packed
def wrong(*args, **kwargs):
    output, weights = attend(*args, **kwargs)
    return output * 1.1, weights
forward.attend_packed = wrong
"""


@pytest.mark.parametrize("is_wrong", [False, True])
def test_selfcheck_passes_and_fails_with_a_wrong_kernel(is_wrong: bool, tmp_path: Path) -> None:
    if is_wrong:
        (tmp_path / "sitecustomize.py").write_text(WRONG_KERNEL)
    command = [sys.executable, "-m", "trl_tpu.cli", "selfcheck", "--output", str(tmp_path / "out.json")]
    environment = {**os.environ, "USE_TORCH_XLA": "0", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == int(is_wrong), process.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    passed = {line["check"]: line["passed"] for line in report["lines"]}
    assert passed["packed: losses"] is not is_wrong and passed["padded: losses"] and passed["resumed: losses"]
    assert report["versions"]["torch"] and report["runs"]["packed"]["marks"]


def test_failing_lines_name_headings_of_the_guide() -> None:
    page = (ROOT / "examples" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = {f"selfcheck-{words.replace(' ', '-')}" for words in re.findall(r"^### selfcheck: (.+)$", page, re.M)}
    named = {*selfcheck._TOLERANCES, "a-run-ends-early", "programs-and-reads"}
    assert {f"selfcheck-{name}" for name in named} == headings
    source = Path(selfcheck.__file__).read_text(encoding="utf-8")
    assert [name for name in named if f'"{name}"' not in source and f'{{_GUIDE}}{name}"' not in source] == []
