"""What a user changed in the model is what trains on XLA, with TRL 1.16's losses (tolerance 1e-5)."""

import json
import os
from pathlib import Path

import apart
import constructors
import customized_models as customized
import pytest
from places import SUPPORT

import trl_tpu


@pytest.mark.parametrize(
    "name",
    [
        "prompt_tuning",  # reads the last column, whatever is in it
        "dynamic_rope",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("averaging", "normalized_head", "prefix_tuning", "longrope")
        ),
    ],
)
def test_losses_are_trls(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"USE_TORCH_XLA": "0"}
    process = apart.python(str(SUPPORT / "customized_models.py"), name, environment=environment)
    assert process.returncode == 0, process.stderr[-4000:]
    make = getattr(customized, name)
    trainer, losses = customized.losses(trl_tpu, make(), tmp_path)
    assert losses == pytest.approx(json.loads(process.stdout.splitlines()[-1]), abs=1e-5)
    assert (trainer.batch_plan.shapes is None) == (make in customized.KEEP_LENGTHS)


@pytest.mark.parametrize("way", constructors.WAYS)
def test_a_class_that_passes_our_constructor_by_trains(way: str, tmp_path: Path) -> None:
    found, expected = constructors.losses(way, tmp_path)
    assert found == pytest.approx(expected, abs=1e-5)
