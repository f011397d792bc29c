"""A packed batch travels whole: through workers, pinning and accelerate to a device, and is read there."""

from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from trl_tpu.data.collators import DataCollatorForPreference, PadToLengths, PlannedRows, UnpaddedRow
from trl_tpu.data.packed_batch import PackedBatch, micro_batches_of, tensors_of
from trl_tpu.modeling.rewards import PackedPairs, PairBatch, other_inputs, read_batch
from trl_tpu.packing.schedule import RowPlan
from trl_tpu.packing.shapes import RowShape

PAIRS = [
    {"chosen_ids": [5, 6, 7, 1], "rejected_ids": [5, 6, 8], "margin": 0.5},
    {"chosen_ids": [9] * 9, "rejected_ids": [4], "margin": 1.5},
    {"chosen_ids": [5, 6, 7, 2], "rejected_ids": [3], "margin": 2.5},
]
PLAN = RowPlan((RowShape(1, 12),), (RowShape(1, 12),))
COLLATORS: dict[str, Any] = {
    "unpadded": UnpaddedRow(0, 100),
    "planned": PlannedRows(PLAN, 4, 0),
    "expanded": PlannedRows(PLAN, 4, 0, expands=True),
}


def named(batch: PackedBatch) -> dict[str, torch.Tensor]:
    """All tensors of all micro-batches."""
    rows = enumerate(batch.micro_batches)
    return {f"{index} {name}": each for index, some in rows for name, each in some.named_tensors().items()}


def assert_equal(one: PackedBatch, other: PackedBatch) -> None:
    ours, theirs = named(one), named(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert [rows.trees for rows in one.micro_batches] == [rows.trees for rows in other.micro_batches]


@pytest.mark.parametrize("kind", COLLATORS)
def test_every_pair_is_in_one_micro_batch(kind: str) -> None:
    batch = COLLATORS[kind](PAIRS)["packed"]
    assert (len(batch.micro_batches) > 1) is (kind != "unpadded")
    counts_P: Any = sum(rows.pair_mask_P.int() for rows in batch.micro_batches)
    assert counts_P.tolist() == [1] * 3 + [0] * (kind != "unpadded")
    for rows in batch.micro_batches:
        assert (rows.trees is not None) is (kind == "unpadded")
        assert (rows.expansion is not None) is (kind == "expanded")
        assert rows.batch_pairs_1.tolist() == [3]
        assert all(isinstance(tensor, torch.Tensor) for tensor in rows.named_tensors().values())


@pytest.mark.parametrize("kind", COLLATORS)
def test_workers_hand_it_over_whole(kind: str) -> None:
    collate = COLLATORS[kind]
    loader = DataLoader(PAIRS, batch_size=3, collate_fn=collate, num_workers=1)  # type: ignore[arg-type]
    (batch,) = loader
    assert_equal(batch["packed"], collate(PAIRS)["packed"])


@pytest.mark.parametrize("kind", COLLATORS)
def test_accelerate_moves_every_tensor(kind: str) -> None:
    batch = COLLATORS[kind](PAIRS)
    moved = send_to_device(batch, torch.device("meta"), non_blocking=True)["packed"]
    assert named(moved).keys() == named(batch["packed"]).keys()
    assert {tensor.device.type for tensor in named(moved).values()} == {"meta"}
    assert_equal(send_to_device(batch, "cpu")["packed"], batch["packed"])


@pytest.mark.parametrize("kind", COLLATORS)
def test_a_loader_pins_every_tensor(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    batch = COLLATORS[kind](PAIRS)
    assert_equal(pin_memory(batch)["packed"], batch["packed"])
    assert len(pinned) == len(named(batch["packed"]))


def test_a_batch_is_split_into_what_is_computed_at_a_time() -> None:
    packed = COLLATORS["planned"](PAIRS)
    some = micro_batches_of(packed | {"more": 1})
    assert [each["rows"] for each in some] == list(packed["packed"].micro_batches)
    assert {each["more"] for each in some} == {1}
    padded = DataCollatorForPreference(0)(PAIRS)
    for batch in (padded, [torch.zeros(1)]):  # a user's need not be a dict
        assert micro_batches_of(batch) == [batch] and tensors_of(batch) is batch  # type: ignore[arg-type]


def test_both_layouts_are_read_alike() -> None:
    packed, padded = COLLATORS["unpadded"](PAIRS), DataCollatorForPreference(0)(PAIRS)
    (rows,) = micro_batches_of(packed)
    ours, theirs = read_batch(rows, 0, "right"), read_batch(padded, 0, "right")
    assert isinstance(ours, PackedPairs) and isinstance(theirs, PairBatch)
    losses_P = torch.tensor([1.0, 2.0, 6.0])
    assert ours.mean(losses_P) == theirs.mean(losses_P) == 3.0
    assert ours.tokens == theirs.tokens == 4 + 3 + 9 + 1 + 4 + 1
    assert ours.labels["margin"].tolist() == theirs.labels["margin"].tolist() == [0.5, 1.5, 2.5]


# what our collators and packed batches call things, and what a user's collator may call its own
KEYS = "weight chosen_probability pair_mask batch_pairs rows packed grade step is_there end labels input_ids_chosen"


@pytest.mark.parametrize("key", KEYS.split())
def test_keys_of_a_users_batch_go_to_the_model(key: str) -> None:
    batch = DataCollatorForPreference(0)(PAIRS)
    added = {**batch, key: torch.zeros(len(PAIRS))}
    assert micro_batches_of(added) == [added]
    assert other_inputs(batch) == {} and other_inputs(added) == {key: added[key]}
    ours, theirs = read_batch(batch, 0, "right"), read_batch(added, 0, "right")
    assert ours.labels.keys() == theirs.labels.keys() == {"margin"}
    losses_P = torch.tensor([1.0, 2.0, 6.0])
    assert ours.mean(losses_P) == theirs.mean(losses_P) == 3.0
    planned = PadToLengths(lambda _: added, (64,), 0)(
        PAIRS
    )  # whatever goes with these lengths would not fit longer ones
    assert planned == added
