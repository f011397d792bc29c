"""Collators return TRL's batches, and batches for user code have TRL's keys in planned lengths.

Loaders seed their workers, and processes wait for each other as in transformers and TRL.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer
from torch.utils.data import DataLoader
from trl.trainer.reward_trainer import DataCollatorForPreference as TrlCollator

from trl_tpu import RewardConfig
from trl_tpu.compat.old_trl import RewardDataCollatorWithPadding
from trl_tpu.data.collate import ComparisonRule
from trl_tpu.data.kinds import Pairs
from trl_tpu.data.loader import host_batches
from trl_tpu.data.trl_dict import DataCollatorForPreference, DictCollator, batches_in, old_columns, read_dict
from trl_tpu.errors import UserError
from trl_tpu.runtime.native import DeviceLoader, Runtime

PAD = 0
ids = st.lists(st.integers(1, 99), min_size=1, max_size=20)
examples = st.lists(
    st.fixed_dictionaries({"chosen_ids": ids, "rejected_ids": ids, "margin": st.floats(-9, 9, width=32)}),
    min_size=1,
    max_size=6,
)
TOKENIZER = tiny_tokenizer(["text"], vocab_size=258)
TOKENIZER.padding_side = "left"
OLD = RewardDataCollatorWithPadding(TOKENIZER)


@settings(deadline=None)
@given(examples, st.sampled_from([None, 1, 7, 8]), st.integers(0, 5), st.booleans())
def test_collator_returns_trls_batch(rows: Any, multiple: int | None, pad_token_id: int, has_margin: bool) -> None:
    rows = rows if has_margin else [{name: row[name] for name in Pairs.columns} for row in rows]
    theirs = TrlCollator(pad_token_id, pad_to_multiple_of=multiple)(rows)
    collate = DataCollatorForPreference(pad_token_id, pad_to_multiple_of=multiple)
    ours = collate(rows)
    assert list(ours) == list(theirs)
    for key in theirs:
        assert ours[key].dtype == theirs[key].dtype
        assert torch.equal(ours[key], theirs[key])


@settings(deadline=None)
@given(examples, st.booleans(), st.integers(0, 2))
def test_batches_for_user_code_get_the_shortest_planned_length(rows: Any, old: bool, missing: int) -> None:
    lengths, side = (4, 8, 16), "left" if old else "right"
    collate: Any = OLD if old else DataCollatorForPreference(PAD)
    filled = [*rows, *[rows[0]] * missing]
    before = collate([old_columns(row) for row in filled] if old else filled)
    after = DictCollator(collate, old, ComparisonRule(), PAD, side, lengths)(filled, real=len(rows))
    keys = [key for key in before if key.startswith(("input_ids", "attention_mask"))]
    longest = max(before[key].shape[1] for key in keys)
    expected = min((length for length in lengths if length >= longest), default=longest)
    for key in keys:
        added = expected - before[key].shape[1]
        assert torch.equal(after[key], torch.nn.functional.pad(before[key], (added, 0) if old else (0, added)))
    assert torch.equal(after["margin"], before["margin"])
    assert len(after) - len(before) == (missing > 0)  # one key marks real rows if TRL's keys do not


PAIR_ROW = {"chosen_ids": [1, 2], "rejected_ids": [3], "margin": 1.0, "grades": [5], "source": "x"}
RANKING_ROW = {"answer_ids": [[1], [2], [3]], "grades": [1.0, 2.0, 3.0], "source": "x"}
SOLUTION_ROW = {"input_ids": [1, 2, 3], "labels": [1, -100, 0], "source": "x"}
OLD_ROW = {
    **{"input_ids_chosen": [1, 2], "attention_mask_chosen": [1, 1], "input_ids_rejected": [3]},
    **{"attention_mask_rejected": [1], "margin": 1.0, "grades": [5], "source": "x"},
}


RECEIVED = [(PAIR_ROW, False, PAIR_ROW), (PAIR_ROW, True, OLD_ROW), (SOLUTION_ROW, False, SOLUTION_ROW)]
RECEIVED += [(RANKING_ROW, is_old, RANKING_ROW) for is_old in (False, True)]


@pytest.mark.parametrize(("row", "is_old", "expected"), RECEIVED)
def test_user_collator_receives_trls_columns_and_data_columns(row: Any, is_old: bool, expected: Any) -> None:
    given: list[Any] = []
    assert DictCollator(lambda rows: given.extend(rows) or {}, is_old, ComparisonRule(), PAD)([row] * 2) == {}
    assert given == [expected] * 2


def test_old_one_number_list_margins_stay_one_per_pair() -> None:
    rows = [old_columns(PAIR_ROW | {"margin": [margin]}) for margin in (0.5, -1.0)]
    assert OLD(rows)["margin"].tolist() == [0.5, -1.0]


def test_batch_without_labels_is_not_read_as_pairs() -> None:
    probable = {"chosen_ids": [1, 2], "rejected_ids": [3], "chosen_probability": 0.3}
    for labels in ({"answer_ids": [[1, 2], [3]], "grades": [1.0, 0.0]}, probable):
        batch = DataCollatorForPreference(0)([labels, labels])
        with pytest.raises(UserError, match="data_collator"):
            read_dict(batch, 0)


# column names of this package, which a user's collator may use as batch keys
KEYS = "weight chosen_probability pair_mask weight_C batch_pairs rows packed grade grades step is_there end labels "
KEYS += "answers step_ends micro_batches comparisons input_ids_chosen attention_mask_rejected"


@pytest.mark.parametrize("key", KEYS.split())
def test_extra_batch_keys_reach_the_model_and_keep_the_loss(key: str) -> None:
    pairs = [{"chosen_ids": [5, 6, 7, 1], "rejected_ids": [5, 6, 8], "margin": margin} for margin in (0.5, 1.5, 2.5)]
    batch = DataCollatorForPreference(0)(pairs)
    added = {**batch, key: torch.zeros(len(pairs))}
    (plain,), (more,) = batches_in(batch, 0), batches_in(added, 0)
    assert plain.extras == {} and more.extras == {key: added[key]}
    torch.testing.assert_close(more.tensors(), plain.tensors(), rtol=0, atol=0, equal_nan=True)
    # batches with extra keys keep their length, because padding would not fit these keys
    assert DictCollator(lambda _: added, False, ComparisonRule(), 0, lengths=(64,))(pairs) == added


# ---- loaders


TWICE = """
import sys, time, subprocesses
subprocesses.become_rank(sys.argv[2], "2")
from accelerate import PartialState
from trl_tpu.data.tokenize import main_processes_first

def note(text):
    with open(sys.argv[1], "a") as file:
        file.write(text)

rank = PartialState(cpu=True).process_index
with main_processes_first():
    note(f"{rank} begins, ")
    time.sleep(1 - rank)
    note(f"{rank} ends, ")
"""


class Draws(list[int]):
    def __getitem__(self, index: Any) -> Any:
        return random.random()


def test_loader_workers_of_all_hosts_use_the_same_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = RewardConfig(str(tmp_path), report_to="none", bf16=False, dataloader_num_workers=2)

    def drawn(rank: int, seed: int = 0) -> list[Any]:
        monkeypatch.setattr(RewardConfig, "process_index", property(lambda _: rank))
        transformers.set_seed(seed)
        return list(host_batches(Draws(range(8)), list, 2, range(8), args))  # type: ignore[arg-type]

    assert drawn(0) == drawn(1) != drawn(0, seed=1)


def test_plain_torch_loader_moves_batches_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "device", torch.device("meta"))
    host: Any = [{"input_ids": torch.ones(2), "text": "as it is"}]
    (batch,) = DeviceLoader(Runtime(), DataLoader(host, batch_size=None), ())
    assert batch["input_ids"].is_meta and batch["text"] == "as it is"


def test_main_process_tokenizes_first(tmp_path: Path) -> None:
    subprocesses.run_ranks(*[("-c", TWICE, str(tmp_path / "order"), rank) for rank in "01"], USE_TORCH_XLA="0")
    assert (tmp_path / "order").read_text() == "0 begins, 0 ends, 1 begins, 1 ends, "
