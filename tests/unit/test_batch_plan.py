"""Whether batches are packed, by which collator and in which shapes, is decided without a trainer."""

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
from datasets import Dataset

from trl_tpu import RewardConfig
from trl_tpu.batching.batch_plan import BatchPlan
from trl_tpu.data.collators import (
    DataCollatorForPreference,
    PadToLengths,
    PairRows,
    PlannedRows,
    UnpaddedRow,
)
from trl_tpu.runtime.native import Runtime


class Compiling(Runtime):
    """Plain torch that says it compiles, for which shapes are planned."""

    plans_shapes = True


COMPILING = Compiling()
TOKENIZER = tiny.tiny_tokenizer(["text"], vocab_size=300)
OURS = DataCollatorForPreference(0)


def tokens(count: int, longest: int = 20) -> Dataset:
    """Pairs that share nothing, of growing length, one in eight long."""
    return Dataset.from_list(
        [
            {
                "chosen_ids": [1 + index % 200] * (longest if index % 8 == 0 else 3 + index % 5),
                "rejected_ids": [201 + index % 90],
            }
            for index in range(count)
        ]
    )


def make(folder: Path, runtime: Any = None, model: Any = None, data: Any = None, **more: Any) -> BatchPlan:
    settings = more.pop("settings", {})
    args = RewardConfig(str(folder), report_to="none", per_device_train_batch_size=4, **settings)
    data = tokens(64) if data is None else data
    model = tiny.tiny_model(TOKENIZER) if model is None else model
    plan = BatchPlan(args, model, TOKENIZER, data, runtime or Runtime(), **more)
    plan.prepare(data, {"eval": tokens(9)})
    return plan


def test_plain_torch_packs_into_one_tight_row(tmp_path: Path) -> None:
    plan = make(tmp_path)
    assert plan.packed and plan.padded_because is None and plan.layout == "packed"
    assert isinstance(plan.collator(tokens(3), 4, plan.default_collator()), UnpaddedRow)
    assert plan.shapes is None and not plan.accumulates
    assert plan.describe() == "each packed into one row without padding"


def test_a_device_that_compiles_gets_planned_rows(tmp_path: Path) -> None:
    plan = make(tmp_path, COMPILING)
    data = tokens(64)
    collate = plan.collator(data, 4, plan.default_collator())
    assert isinstance(collate, PlannedRows) and collate.pairs == 4 and not collate.expands
    assert collate.plan is plan.rows(data, 4)  # planned once
    assert plan.rows(data, 8) != plan.rows(data, 4)
    training = plan.rows(plan._train_dataset, 4)
    assert plan.shapes == len(training.shapes) and plan.accumulates == bool(training.accumulate)
    assert plan.describe() == f"packed into rows of {training}; they attend through masks"


def test_expanded_attention_is_chosen_before_training(tmp_path: Path) -> None:
    model = tiny.tiny_model(TOKENIZER)
    plan = make(tmp_path, COMPILING, model, settings={"packed_attention": "expanded"})
    collate = plan.collator(tokens(9), 4, plan.default_collator())
    assert isinstance(collate, PlannedRows) and collate.expands
    assert model.config._attn_implementation == "trl_tpu_expanded"
    assert "in rows of whole dialogues" in plan.describe()
    again = tiny.tiny_model(TOKENIZER)  # as `model_init` makes for a trial
    plan.use_model(again)
    assert again.config._attn_implementation == "trl_tpu_expanded"


def test_a_row_length_too_short_for_the_evaluation_data_is_refused_before_training(tmp_path: Path) -> None:
    plan = make(tmp_path, COMPILING, settings={"row_length": 32})
    with pytest.raises(ValueError, match="row_length=32 is too short: the largest pair takes 41 tokens"):
        plan.prepare(tokens(64), {"one": tokens(9), "other": tokens(9, longest=40)})


OBSTACLES: dict[str, tuple[dict[str, Any], str]] = {
    "old columns": ({"old_columns": True}, "this is the old API"),
    "collator": ({"data_collator": OURS}, "a data collator of your own"),
    "loss": ({"reads_padded_rows": lambda: "compute_loss"}, "compute_loss is overridden"),
    "FSDP": ({"settings": {"fsdp": True}}, "accelerate shards the model"),
    "tokens": ({"settings": {"include_num_input_tokens_seen": True}}, "include_num_input_tokens_seen counts padded"),
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_stands_in_the_way_is_told_once_or_refused(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments, obstacle = OBSTACLES[kind]
    with caplog.at_level(logging.WARNING):
        plan = make(tmp_path, COMPILING, **arguments)
    told = [record.getMessage() for record in caplog.records if "padded, not packed" in record.getMessage()]
    assert len(told) == 1 and obstacle in told[0]
    assert not plan.packed and plan.layout == "padded" and obstacle in (plan.padded_because or "")
    assert obstacle in plan.describe()
    settings = arguments.get("settings", {})
    with pytest.raises(ValueError, match=f"packing=True is impossible: {obstacle}"):
        make(tmp_path, COMPILING, **arguments | {"settings": settings | {"packing": True}})
    caplog.clear()
    assert not make(tmp_path, COMPILING, **arguments | {"settings": settings | {"packing": False}}).packed
    assert not [record for record in caplog.records if "padded" in record.getMessage()]


def test_models_that_accelerates_launcher_shards_train_on_padded_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "accelerate shards the model" in (make(tmp_path).padded_because or "")


def test_a_stream_has_no_shapes_to_plan(tmp_path: Path) -> None:
    stream = tokens(9).to_iterable_dataset()
    assert make(tmp_path, data=stream).packed
    plan = make(tmp_path, COMPILING, data=stream)
    assert "train_dataset is a stream" in (plan.padded_because or "")
    packed = make(tmp_path, COMPILING)  # and one that is only evaluated on is padded alone
    assert isinstance(packed.collator(stream, 4, packed.default_collator()), PairRows)
    assert isinstance(packed.collator(tokens(9), 4, packed.default_collator()), PlannedRows)


def test_padded_batches_have_planned_lengths_where_each_is_compiled(tmp_path: Path) -> None:
    off = {"settings": {"packing": False}}
    assert make(tmp_path, **off).collator(tokens(9), 4, OURS) is OURS
    plan = make(tmp_path, COMPILING, **off)
    collate = plan.collator(tokens(9), 4, plan.default_collator())
    assert isinstance(collate, PairRows) and isinstance(collate.collate, PadToLengths)
    assert plan.shapes == len(collate.collate.lengths) and not plan.accumulates
    assert isinstance(
        make(tmp_path, COMPILING, reads_padded_rows=lambda: "compute_loss").collator(tokens(9), 4, OURS), PadToLengths
    )
    assert plan.collator(tokens(9), 4, len) is len  # one of the user's knows best


def test_packing_is_read_from_what_users_write(tmp_path: Path) -> None:
    values: tuple[Any, ...] = ("auto", "AUTO", True, "true", "on", False, "False", "no")
    read = [RewardConfig(str(tmp_path), report_to="none", packing=value).packing for value in values]
    assert read == ["auto"] * 2 + ["true"] * 3 + ["false"] * 3
