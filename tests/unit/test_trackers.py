"""Each tracker, the real package without a network, has the numbers of logs, and margins and pairs of evaluations."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from trl_tpu import RewardConfig, RewardTrainer

COLUMNS = ("margin", "reward of chosen", "reward of rejected", "chosen", "rejected")

MakeTrainer = Callable[..., RewardTrainer]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory: pytest.TempPathFactory) -> MakeTrainer:
    folder, pairs = tmp_path_factory.mktemp("model"), tiny.made_up_pairs(40)
    model = tiny.save_tiny(folder, [text for row in pairs for text in row.values()])

    def make(out: Path, tracker: str, **settings: Any) -> RewardTrainer:
        defaults = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "no"}
        defaults |= {"bf16": False, "disable_tqdm": True, "eval_strategy": "steps", "eval_steps": 2}
        args = RewardConfig(str(out), report_to=tracker, run_name="a run", **defaults | settings)
        evaluated = pairs.select(range(16, 40))
        return RewardTrainer(model, args, train_dataset=pairs.select(range(16)), eval_dataset=evaluated)

    return make


def expected_rows(trainer: RewardTrainer) -> list[tuple[float, float, float, str, str]]:
    """The 16 pairs with the least margins, by the trainer's own predictions."""
    for kind in (TensorBoardCallback, WandbCallback, TrackioCallback):
        trainer.remove_callback(kind)  # their runs have ended
    dataset, tokenizer = trainer.eval_dataset, trainer.processing_class
    rewards_N2 = trainer.predict(dataset).predictions
    rows = []
    for index in np.argsort(rewards_N2[:, 0] - rewards_N2[:, 1], kind="stable")[:16].tolist():
        pair = dataset[index]["chosen_ids"], dataset[index]["rejected_ids"]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in pair]
        chosen, rejected = rewards_N2[index].tolist()
        rows.append((chosen - rejected, chosen, rejected, *texts))
    return rows


def check_table(rows: list[list[Any]], trainer: RewardTrainer) -> None:
    expected = expected_rows(trainer)
    assert len(rows) == len(expected) == 16
    for row, other in zip(rows, expected, strict=True):
        assert row[:3] == pytest.approx(other[:3], abs=1e-5)
        assert row[3:] == list(other[3:]) and "Count on from" in row[3]


@needs("tensorboard")
def test_tensorboard(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = make_trainer(tmp_path / "out", "tensorboard")
    trainer.train()
    found = EventAccumulator(str(tmp_path / "events"), size_guidance={"histograms": 0, "tensors": 0}).Reload()
    tags = found.Tags()
    assert {"train/loss", "train/pairs_per_second", "train/memory_gib", "eval/accuracy"} <= set(tags["scalars"])
    (histogram,) = found.Histograms("eval/margins")
    assert histogram.step == 2 and histogram.histogram_value.num == 24
    rows = expected_rows(trainer)
    assert histogram.histogram_value.min == pytest.approx(rows[0][0], abs=1e-5)
    (text,) = found.Tensors("eval/pairs/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert lines[0] == f"| {' | '.join(COLUMNS)} |" and len(lines) == 18
    assert lines[2] == "| " + " | ".join([*(f"{number:.3f}" for number in rows[0][:3]), *rows[0][3:]]) + " |"


@needs("wandb")
def test_wandb(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    folders = {f"WANDB_{name}DIR": str(tmp_path) for name in ("", "CACHE_", "CONFIG_", "DATA_")}
    for name, value in ({"WANDB_MODE": "offline", "WANDB_SILENT": "true"} | folders).items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(tmp_path / "out", "wandb")
    try:
        trainer.train()
        logged = dict(wandb.run.summary)
        wandb.finish()
    finally:
        wandb.teardown()  # its process
    assert logged["train/global_step"] == 2 and logged["train/pairs_per_second"] > 0
    assert sum(logged["eval/margins"]["values"]) == 24
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/eval/pairs_*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == list(COLUMNS)
    check_table(table["data"], trainer)


@needs("trackio")
def test_trackio(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its folder when it is imported
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trainer = make_trainer(tmp_path / "out", "trackio", project="tracked")
    trainer.train()
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("tracked", "a run")
    assert any(log.get("train/pairs_per_second", 0) > 0 for log in logs)
    (shown,) = [log for log in logs if "eval/margins" in log]
    assert shown["train/global_step"] == 2
    assert sum(shown["eval/margins"]["values"]) == 24
    rows = shown["eval/pairs"]["_value"]
    assert {tuple(row) for row in rows} == {COLUMNS}
    check_table([list(row.values()) for row in rows], trainer)


@needs("tensorboard")
def test_pairs_that_are_not_known_are_left_out_and_infinite_margins(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = make_trainer(tmp_path / "out", "tensorboard")
    pairs: Any = trainer.eval_dataset
    trainer.evaluate({"hard": pairs.select(range(4)), "stream": pairs.to_iterable_dataset()})
    with torch.no_grad():
        trainer.model.score.weight.fill_(float("nan"))
    trainer.evaluate()
    found = EventAccumulator(str(tmp_path / "events"), size_guidance={"tensors": 0}).Reload()
    assert set(found.Tags()["histograms"]) == {"eval/hard_margins", "eval/stream_margins"}
    assert [tag for tag in found.Tags()["tensors"] if "pairs" in tag] == ["eval/hard_pairs/text_summary"]
