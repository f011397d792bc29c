"""Models with recurrent layers on XLA: packed rows, computed on the device, with plain torch's losses."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import tiny
import torch
from counters import CountAtSteps
from environment import ROOT, SUPPORT
from recent_families import tiny_classifier
from training import QUIET, losses, trained
from transformers import AutoTokenizer

from trl_tpu import RewardConfig, RewardTrainer

SETTINGS: dict[str, Any] = QUIET | {"max_steps": 6, "logging_steps": 1, "learning_rate": 1e-3, "max_shapes": 1}
SETTINGS |= {"per_device_train_batch_size": 4, "save_strategy": "no"}


def run(model_folder: str, folder: str, **own: Any) -> RewardTrainer:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = tiny_classifier("qwen3_5_text", vocab_size=len(tokenizer), num_hidden_layers=4)
    args = RewardConfig(folder, **SETTINGS)
    return trained(RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(40), processing_class=tokenizer, **own))


PLAIN = """
import json, sys
from test_recurrent_models import losses, run
print(json.dumps(losses(run(*sys.argv[1:]))))
"""


def test_linear_attention_runs_on_the_device(model_folder: str, tmp_path: Path) -> None:
    """One program per step, and reads only at logs: transformers' code would also read if there is padding."""
    counter = CountAtSteps()
    trainer = run(model_folder, str(tmp_path / "xla"), callbacks=[counter])
    assert trainer.batch_plan.padding_reason is None
    counts = counter.between(1, 5)
    assert counts.compiles == 0 and counts.device_to_host == counts.executions == 4
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT), str(SUPPORT), str(Path(__file__).parent)])
    plain = subprocesses.run("-c", PLAIN, model_folder, str(tmp_path / "plain"), USE_TORCH_XLA="0", PYTHONPATH=path)
    assert losses(trainer) == pytest.approx(json.loads(plain.stdout.splitlines()[-1]), abs=1e-5)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("upper", [True, False])
def test_triangular_systems_are_solved_on_the_device(left: bool, upper: bool) -> None:
    import torch_xla.debug.metrics as metrics

    matrix, values = torch.randn(2, 8, 8) * 0.3, torch.randn(2, 8, 8)
    expected = torch.linalg.solve_triangular(matrix, values, upper=upper, left=left, unitriangular=True)
    moved = (each.to("xla") for each in (matrix, values))
    found = torch.linalg.solve_triangular(*moved, upper=upper, left=left, unitriangular=True)
    torch.testing.assert_close(found.cpu(), expected)
    assert "aten::linalg_solve_triangular" not in metrics.counter_names()
