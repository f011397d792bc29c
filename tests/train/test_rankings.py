"""Training on rankings: packed equals padded in every layout, and a known order is learned, of pairs too."""

from pathlib import Path
from typing import Any

import pytest
import tiny
from datasets import Dataset
from timings import untimed
from tiny import made_up_rankings as rankings

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.packing.schedule import RowPlan
from trl_tpu.packing.shapes import RowShape

LOSSES: list[dict[str, Any]] = [
    {"margin_scale": 0.3, "label_smoothing": 0.1, "center_rewards_coefficient": 0.1},
    {"loss_type": "plackett_luce", "ranking_top_k": 2},
    {"loss_type": "regression"},
    {"ties": "davidson", "tie_threshold": 0.5, "average_over": "comparisons"},
]


class FixedRows(RewardTrainer):
    fixed_rows = RowPlan((RowShape(1, 96),), (RowShape(1, 128),))  # of which most batches take several


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = rankings(20)
    texts = [*rows["prompt"], *(text for row in rows["completions"] for text in row)]
    return tiny.save_tiny(tmp_path_factory.mktemp("model"), texts)


def trained(
    model: str, out: Path, kind: type[RewardTrainer] = RewardTrainer, data: Any = None, **settings: Any
) -> Any:
    defaults: dict[str, Any] = {
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 6,
        "per_device_train_batch_size": 5, "learning_rate": 1e-3, "bf16": False,
    }  # fmt: skip
    data = data or rankings(23)
    trainer = kind(
        model, RewardConfig(str(out), **defaults | settings), train_dataset=data, eval_dataset=rankings(7, 3)
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("loss", LOSSES)
def test_packed_equals_padded(model: str, tmp_path: Path, loss: dict[str, Any]) -> None:
    runs = [
        trained(model, tmp_path / "padded", packing=False, **loss),
        trained(model, tmp_path / "tight", packing=True, **loss),
        trained(model, tmp_path / "micro-batches", FixedRows, packing=True, **loss),
    ]
    logs = [
        [untimed(log) for log in run.state.log_history if "loss" in log] + [untimed(run.evaluate())] for run in runs
    ]
    predicted = [run.predict(rankings(4, 5, seed=1)).predictions for run in runs]
    for other, rewards_NK in zip(logs[1:], predicted[1:], strict=True):
        assert len(other) == len(logs[0])
        for one, two in zip(logs[0], other, strict=True):
            assert two == pytest.approx(one, abs=2e-5)
        assert rewards_NK == pytest.approx(predicted[0], abs=2e-5, nan_ok=True)
    assert logs[0][0]["num_tokens"] > 0 and {"eval_kendall_tau", "eval_top1_accuracy"} <= logs[0][-1].keys()


def test_a_resumed_run_is_the_same_run(model: str, tmp_path: Path) -> None:
    whole = trained(model, tmp_path, save_strategy="steps", save_steps=3)
    again = RewardTrainer(model, whole.args, train_dataset=rankings(23), eval_dataset=rankings(7, 3))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    logs = [[untimed(log) for log in run.state.log_history if "loss" in log] for run in (whole, again)]
    assert logs[0] == logs[1]


def test_a_known_order_is_found(model: str, tmp_path: Path) -> None:
    run = trained(model, tmp_path, data=rankings(120), max_steps=60, learning_rate=3e-3, per_device_train_batch_size=8)
    assert run.evaluate(rankings(40, 5, seed=2))["eval_kendall_tau"] > 0.95
    pairs = [{"prompt": row["prompt"], "chosen": " on on on on", "rejected": " on stop"} for row in rankings(9)]
    assert run.evaluate(Dataset.from_list(pairs))["eval_accuracy"] > 0.95
