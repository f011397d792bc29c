"""Before a shape is compiled, a line says which of how many; trackers and logs have what they have in plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from trl_tpu import RewardTrainer


def test_says_each_shape_once_before_it_is_compiled(
    config: Callable[..., Any], model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tiny.made_up_pairs(64)
    args = config(max_steps=4, logging_steps=1, disable_tqdm=False, packing=False, max_shapes=2, eval_strategy="steps")
    args.eval_steps = 3
    trainer = RewardTrainer(model_folder, args, train_dataset=pairs, eval_dataset=pairs.select(range(20)))
    planned = trainer.batch_plan.shapes
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    evaluation = [line for line in lines if line.endswith("for evaluation ...")]
    assert evaluation[0] == "step 3/4: compiling shape 1 for evaluation ..."
    said = [line for line in lines if "compiling" in line and line not in evaluation]
    assert lines[0] == said[0] == f"step 0/4: compiling shape 1 of {planned} ..."
    assert [line.partition("compiling ")[2] for line in said] == [
        f"shape {number} of {planned} ..." for number in range(1, len(said) + 1)
    ]
    assert planned is not None and len(said) <= planned
    assert len(lines) == len(said) + len(evaluation) + 7  # logs, two of evaluations, and the end


def test_trackers_have_the_pairs_of_evaluations_and_logs_the_rates(
    config: Callable[..., Any], model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    pairs = tiny.made_up_pairs(40)
    args = config(max_steps=1, logging_steps=1, eval_strategy="steps", eval_steps=1, report_to="tensorboard")
    trainer = RewardTrainer(model_folder, args, train_dataset=pairs, eval_dataset=pairs.select(range(10)))
    trainer.train()
    found = accumulator.EventAccumulator(str(tmp_path / "events"), size_guidance={"tensors": 0}).Reload()
    assert found.Histograms("eval/margins")[0].histogram_value.num == 10
    lines = found.Tensors("eval/pairs/text_summary")[0].tensor_proto.string_val[0].decode().splitlines()
    assert len(lines) == 2 + 10 and "Count on from" in lines[2]
    log = trainer.state.log_history[0]
    assert 0 < log["pairs_per_second"] < log["tokens_per_second"] and log["model_tflops_per_second"] > 0
    assert log["seconds_per_step"] > 0 and log["compiled_programs"] >= 1
    assert 0.1 < log["memory_gib"] < 100 and "mfu" not in log
