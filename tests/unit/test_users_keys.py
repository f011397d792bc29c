"""A batch that a user's collator made: its own keys go to the model, and none of them changes the loss."""

import pytest
import torch

from trl_tpu.data.collators import DataCollatorForPreference, DictCollator, batches_in
from trl_tpu.data.comparisons import ComparisonRule
from trl_tpu.modeling.losses import Loss

PAIRS = [
    {"chosen_ids": [5, 6, 7, 1], "rejected_ids": [5, 6, 8], "margin": 0.5},
    {"chosen_ids": [9] * 9, "rejected_ids": [4], "margin": 1.5},
    {"chosen_ids": [5, 6, 7, 2], "rejected_ids": [3], "margin": 2.5},
]
# names of our own data, which a user's collator may use, too
KEYS = "weight chosen_probability pair_mask weight_C batch_pairs rows packed grade grades step is_there end labels"
KEYS += " answers step_ends micro_batches comparisons input_ids_chosen attention_mask_rejected"


@pytest.mark.parametrize("key", KEYS.split())
def test_keys_of_a_users_batch_go_to_the_model(key: str) -> None:
    batch = DataCollatorForPreference(0)(PAIRS)
    added = {**batch, key: torch.zeros(len(PAIRS))}
    (plain,), (more,) = batches_in(batch, 0), batches_in(added, 0)
    assert plain.extras == {} and more.extras == {key: added[key]}
    expected, found = plain.tensors(), more.tensors()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    rewards_SA = torch.randn(2 * len(PAIRS), 1, generator=torch.Generator().manual_seed(0))
    assert Loss().per_row(rewards_SA, more.table).tolist() == Loss().per_row(rewards_SA, plain.table).tolist()
    # keys that belong to this length would not fit longer planned ones
    planned = DictCollator(lambda _: added, False, ComparisonRule(), 0, lengths=(64,))(PAIRS)
    assert planned == added
