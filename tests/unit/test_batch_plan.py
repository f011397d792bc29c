"""The batch plan chooses a layout without a trainer."""

from pathlib import Path
from typing import Any

import pytest
import tiny
from datasets import Dataset
from preference_rows import dataset_of
from recent_families import tiny_classifier

from trl_tpu import RewardConfig
from trl_tpu.data.length_stats import length_stats
from trl_tpu.data.trl_dict import DataCollatorForPreference
from trl_tpu.modeling import forward
from trl_tpu.packing.pack import TreeLayout
from trl_tpu.parallel.mesh import MeshShape, parse_topology
from trl_tpu.plan.layouts import Layout
from trl_tpu.runtime import Remat
from trl_tpu.runtime.native import Runtime
from trl_tpu.training.batch_plan import BatchPlan, Padded, Planned, TrlDict, Unpadded


class Compiling(Runtime):
    """Plain torch that claims to compile programs, so that shapes are planned."""

    plans_shapes = has_attention_kernel = True


COMPILING = Compiling()
TOKENIZER = tiny.tiny_tokenizer(["text"], vocab_size=300)
OURS = DataCollatorForPreference(0)


def tokens(count: int, longest: int = 20) -> Dataset:
    """Return pairs of growing length without shared tokens; every eighth is long."""
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


def test_recurrent_layers_are_packed_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "few_kernels", lambda _: True)
    layout = make(tmp_path, model=tiny_classifier("qwen3_5_text"), settings={"bf16": False}).layout
    assert isinstance(layout, Unpadded) and layout.trees == TreeLayout("rows", is_recurrent=True)


def test_compiling_devices_get_planned_rows_and_plain_torch_tight_rows(tmp_path: Path) -> None:
    plain = make(tmp_path).layout
    assert isinstance(plain, Unpadded) and plain.name == "packed" and plain.shapes is None and not plain.accumulates
    plan, data = make(tmp_path, COMPILING), tokens(64)
    layout = plan.layout_of(data, 4)
    assert isinstance(layout, Planned) and layout.name == "packed" and not layout.expands
    assert layout.plan is plan.shapes_of(data, 4) != plan.shapes_of(data, 8)  # cached
    training = plan.layout.plan
    assert plan.layout.shapes == len(training.shapes) and plan.layout.accumulates == bool(training.accumulate)
    assert str(training) in str(plan.layout)


def test_expanded_attention_is_chosen_before_training(tmp_path: Path) -> None:
    model = tiny.tiny_model(TOKENIZER)
    plan = make(tmp_path, COMPILING, model, settings={"packed_attention": "expanded"})
    assert "rows of whole sequences" in str(plan.layout_of(tokens(9), 4))
    assert model.config._attn_implementation == "trl_tpu_expanded"
    again = tiny.tiny_model(TOKENIZER)  # `model_init` builds one like it for each trial
    plan.use_model(again)
    assert again.config._attn_implementation == "trl_tpu_expanded"


@pytest.mark.parametrize(("attention", "length"), [("masks", 2400), ("auto", 2560)])
def test_planned_rows_equal_the_rows_of_training(attention: str, length: int, tmp_path: Path) -> None:
    """Long rows use a kernel unless masks are requested; the kernel needs lengths that are multiples of 256."""
    data = dataset_of([([at] * 1700, [at] * 1000 + [99] * 700) for at in range(1, 11)])
    model = tiny.tiny_model(TOKENIZER)
    plan = make(tmp_path, COMPILING, model, data, settings={"packed_attention": attention})
    topology = parse_topology("v6e:1x1")
    layout = Layout(model, plan._args, length_stats(data).lengths, data, topology, MeshShape(), Remat.FULL, 4)
    assert layout.shape.length == length and layout.shape in plan.layout.plan.shapes


def test_row_length_too_short_for_evaluation_is_rejected_before_training(tmp_path: Path) -> None:
    plan = make(tmp_path, COMPILING, settings={"row_length": 32})
    with pytest.raises(ValueError, match="row_length=32.*41"):
        plan.prepare(tokens(64), {"one": tokens(9), "other": tokens(9, longest=40)})


OBSTACLES: dict[str, tuple[dict[str, Any], str]] = {
    "collator": ({"data_collator": lambda rows: {}}, "data collator"),
    "loss": ({"reads_padded_rows": lambda: "compute_loss"}, "compute_loss"),
    "tokens": ({"settings": {"include_num_input_tokens_seen": True}}, "include_num_input_tokens_seen"),
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_obstacle_to_packing_is_told_once_or_raised(kind: str, tmp_path: Path, caplog: Any) -> None:
    arguments, obstacle = OBSTACLES[kind]
    settings = arguments.get("settings", {})
    for packing, times in ((None, 1), (False, 0)):
        caplog.clear()
        chosen = {} if packing is None else {"packing": packing}
        plan = make(tmp_path, COMPILING, **arguments | {"settings": settings | chosen})
        assert [obstacle in record.getMessage() for record in caplog.records].count(True) == times
        assert plan.padding_reason and plan.layout.name == "padded" and plan.padding_reason in str(plan.layout)
        assert packing is False or obstacle in plan.padding_reason
    with pytest.raises(ValueError, match=f"packing=True.*{obstacle}"):
        make(tmp_path, COMPILING, **arguments | {"settings": settings | {"packing": True}})


@pytest.mark.parametrize("given", [{"old_columns": True}, {"data_collator": OURS}])
def test_trls_columns_and_collators_allow_packing(given: dict[str, Any], tmp_path: Path) -> None:
    assert isinstance(make(tmp_path, **given).layout, Unpadded)
    assert isinstance(make(tmp_path, COMPILING, **given).layout, Planned)


def test_streams_with_max_length_are_packed_on_every_device(tmp_path: Path) -> None:
    stream, unbounded = tokens(90).to_iterable_dataset(), {"settings": {"max_length": None}}
    assert isinstance(make(tmp_path, data=stream, **unbounded).layout, Unpadded)
    assert "max_length" in (make(tmp_path, COMPILING, data=stream, **unbounded).padding_reason or "")
    packed = make(tmp_path, COMPILING, **unbounded)  # only an evaluation on such a stream is padded
    assert type(packed.layout_of(stream, 4)) is Padded and isinstance(packed.layout_of(tokens(9), 4), Planned)
    bounded = {"settings": {"max_length": 60}}
    plan = make(tmp_path, COMPILING, data=stream, **bounded)
    rows = plan.layout.plan
    assert rows.longest >= 2 * 60 and min(shape.length for shape in rows.shapes) <= 40
    again = make(tmp_path, COMPILING, data=tokens(90).to_iterable_dataset(), **bounded)  # as in a resumed run
    assert again.layout.plan == rows
    longest = [dataset_of([([at] * 60, [at + 100] * 60)])[0] for at in range(1, 5)]  # longer than the sample
    (*_, last) = plan.collator(stream, 4, plan.default_collator())(longest).parts
    assert last.table.row_weight_P.sum() == 4
    with pytest.raises(ValueError, match="row_length=64.*120"):
        make(tmp_path, COMPILING, data=stream, settings={"max_length": 60, "row_length": 64})
    empty = make(tmp_path, COMPILING, data=stream.take(0), **bounded)
    assert empty.layout.plan.longest >= 2 * 60


def test_padded_batches_have_planned_lengths_on_compiling_devices(tmp_path: Path) -> None:
    off = {"settings": {"packing": False}}
    assert make(tmp_path, **off).layout.shapes is None
    plan = make(tmp_path, COMPILING, **off)
    collate = plan.collator(tokens(9), 4, plan.default_collator())
    assert plan.layout.shapes == 1 and not plan.layout.accumulates
    assert {tuple(collate(list(rows)).parts[0].input_ids_RL.shape) for rows in (tokens(1), tokens(4))} == {(8, 64)}


def test_user_code_gets_trls_keys_and_user_collators_are_called(tmp_path: Path) -> None:
    plan = make(tmp_path, COMPILING, reads_padded_rows=lambda: "compute_loss")
    assert isinstance(plan.layout, TrlDict)
    batch = plan.collator(tokens(9), 4, OURS)(list(tokens(4)))
    assert batch.keys() == {"input_ids", "attention_mask"} and batch["input_ids"].shape == (8, 64)
    own = plan.collator(tokens(9), 4, lambda rows: {"mine": [sorted(row) for row in rows]})
    assert own(list(tokens(4))) == {"mine": [["chosen_ids", "rejected_ids"]] * 4}  # the collator chooses the lengths


def test_packing_accepts_common_spellings(tmp_path: Path) -> None:
    values: tuple[Any, ...] = ("auto", "AUTO", True, "true", "on", False, "False", "no")
    read = [RewardConfig(str(tmp_path), report_to="none", packing=value).packing for value in values]
    assert read == ["auto"] * 2 + ["true"] * 3 + ["false"] * 3
