"""Whether batches are packed, by which collator and in which shapes, is decided without a trainer."""

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
from datasets import Dataset
from tokenized import dataset_of

from trl_tpu import RewardConfig
from trl_tpu.data.collators import DataCollatorForPreference, DictCollator
from trl_tpu.packing.pack import pack_unpadded, pad
from trl_tpu.packing.planned import pack
from trl_tpu.runtime.native import Runtime
from trl_tpu.training.batch_plan import BatchPlan


class Compiling(Runtime):
    """Plain torch that says it compiles, for which shapes are planned."""

    plans_shapes = True


COMPILING = Compiling()
TOKENIZER = tiny.tiny_tokenizer(["text"], vocab_size=300)
OURS = DataCollatorForPreference(0)


def tokens(count: int, longest: int = 20) -> Dataset:
    """Pairs that share nothing, of growing length, one in eight long."""
    lengths = [longest if index % 8 == 0 else 3 + index % 5 for index in range(count)]
    return dataset_of([([1 + index % 200] * length, [201 + index % 90]) for index, length in enumerate(lengths)])


def make(folder: Path, runtime: Any = None, model: Any = None, data: Any = None, **more: Any) -> BatchPlan:
    settings = more.pop("settings", {})
    args = RewardConfig(str(folder), report_to="none", per_device_train_batch_size=4, **settings)
    data = tokens(64) if data is None else data
    model = tiny.tiny_model(TOKENIZER) if model is None else model
    plan = BatchPlan(args, model, TOKENIZER, data, runtime or Runtime(), **more)
    plan.prepare(data, {"eval": tokens(9)})
    return plan


def collator(plan: BatchPlan, data: Any = None, own: Any = None) -> Any:
    return plan.collator(tokens(9) if data is None else data, 4, own or plan.default_collator())


def test_plain_torch_packs_into_one_tight_row(tmp_path: Path) -> None:
    plan = make(tmp_path)
    assert plan.packed and plan.padded_because is None and plan.layout == "packed"
    assert collator(plan).lay_out.func is pack_unpadded
    assert plan.shapes is None and not plan.accumulates


def test_a_device_that_compiles_gets_planned_rows(tmp_path: Path) -> None:
    plan = make(tmp_path, COMPILING)
    data = tokens(64)
    collate = collator(plan, data)
    lay_out = collate.lay_out
    assert lay_out.func is pack and collate.part.pairs == 4 and not lay_out.keywords["expands"]
    assert lay_out.keywords["plan"] is plan.rows(data, 4)  # planned once
    assert plan.rows(data, 8) != plan.rows(data, 4)
    training = plan.rows(plan._train_dataset, 4)
    assert plan.shapes == len(training.shapes) and plan.accumulates == bool(training.accumulate)
    assert str(training) in plan.describe()


def test_expanded_attention_is_chosen_before_training(tmp_path: Path) -> None:
    model = tiny.tiny_model(TOKENIZER)
    plan = make(tmp_path, COMPILING, model, settings={"packed_attention": "expanded"})
    assert collator(plan).lay_out.keywords["expands"]
    assert model.config._attn_implementation == "trl_tpu_expanded"
    again = tiny.tiny_model(TOKENIZER)  # as `model_init` makes for a trial
    plan.use_model(again)
    assert again.config._attn_implementation == "trl_tpu_expanded"


def test_a_row_length_too_short_for_the_evaluation_data_is_refused_before_training(tmp_path: Path) -> None:
    plan = make(tmp_path, COMPILING, settings={"row_length": 32})
    with pytest.raises(ValueError, match="row_length=32.*41"):
        plan.prepare(tokens(64), {"one": tokens(9), "other": tokens(9, longest=40)})


OBSTACLES: dict[str, tuple[dict[str, Any], str]] = {
    "collator": ({"data_collator": lambda rows: {}}, "data collator"),
    "loss": ({"reads_padded_rows": lambda: "compute_loss"}, "compute_loss"),
    "FSDP": ({"settings": {"fsdp": True}}, "accelerate"),
    "tokens": ({"settings": {"include_num_input_tokens_seen": True}}, "include_num_input_tokens_seen"),
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_stands_in_the_way_is_told_once_or_refused(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments, obstacle = OBSTACLES[kind]
    with caplog.at_level(logging.WARNING):
        plan = make(tmp_path, COMPILING, **arguments)
    assert [obstacle in record.getMessage() for record in caplog.records].count(True) == 1
    assert not plan.packed and plan.layout == "padded"
    assert obstacle in str(plan.padded_because) and obstacle in plan.describe()
    settings = arguments.get("settings", {})
    with pytest.raises(ValueError, match=f"packing=True.*{obstacle}"):
        make(tmp_path, COMPILING, **arguments | {"settings": settings | {"packing": True}})
    caplog.clear()
    assert not make(tmp_path, COMPILING, **arguments | {"settings": settings | {"packing": False}}).packed
    assert not [record for record in caplog.records if obstacle in record.getMessage()]


@pytest.mark.parametrize("given", [{"old_columns": True}, {"data_collator": OURS}])
def test_trls_own_columns_and_collators_stand_in_no_way(given: dict[str, Any], tmp_path: Path) -> None:
    assert make(tmp_path, **given).packed and make(tmp_path, COMPILING, **given).packed


def test_models_that_accelerates_launcher_shards_train_on_padded_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "accelerate shards the model" in (make(tmp_path).padded_because or "")


def test_a_stream_has_no_shapes_to_plan(tmp_path: Path) -> None:
    stream = tokens(9).to_iterable_dataset()
    assert make(tmp_path, data=stream).packed
    plan = make(tmp_path, COMPILING, data=stream)
    assert "stream" in (plan.padded_because or "")
    packed = make(tmp_path, COMPILING)  # and one that is only evaluated on is padded alone
    assert collator(packed, stream).lay_out.func is pad
    assert collator(packed).lay_out.func is pack


def test_padded_batches_have_planned_lengths_where_each_is_compiled(tmp_path: Path) -> None:
    off = {"settings": {"packing": False}}
    assert collator(make(tmp_path, **off)).lay_out.keywords["lengths"] is None
    plan = make(tmp_path, COMPILING, **off)
    collate = collator(plan)
    assert plan.shapes == len(collate.lay_out.keywords["lengths"]) and not plan.accumulates
    assert {tuple(collate(list(rows)).parts[0].rows.input_ids_RL.shape) for rows in (tokens(1), tokens(4))} == {
        (8, 64)
    }


def test_code_of_users_gets_trls_keys_and_their_collator_makes_them(tmp_path: Path) -> None:
    plan = make(tmp_path, COMPILING, reads_padded_rows=lambda: "compute_loss")
    batch = collator(plan, own=OURS)(list(tokens(4)))
    assert batch.keys() == {"input_ids", "attention_mask"} and batch["input_ids"].shape == (8, 64)
    own = collator(plan, own=lambda rows: {"mine": [sorted(row) for row in rows]})
    assert isinstance(own, DictCollator)
    assert own(list(tokens(4))) == {"mine": [["chosen_ids", "rejected_ids"]] * 4}  # of lengths that are its own


def test_packing_is_read_from_what_users_write(tmp_path: Path) -> None:
    values: tuple[Any, ...] = ("auto", "AUTO", True, "true", "on", False, "False", "no")
    read = [RewardConfig(str(tmp_path), report_to="none", packing=value).packing for value in values]
    assert read == ["auto"] * 2 + ["true"] * 3 + ["false"] * 3
