"""Models with learned positions read sequences up to that length; one more token makes the model raise."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from preference_rows import tiny_tokenizer
from transformers import AutoConfig, AutoModelForSequenceClassification

from trl_tpu import RewardConfig
from trl_tpu.data.trl_dict import old_columns
from trl_tpu.errors import UserError
from trl_tpu.modeling.build import build_dataset
from trl_tpu.modeling.model_shape import learned_positions

TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 300}
TINY |= {"max_position_embeddings": 40, "pad_token_id": 1, "num_labels": 1}
FAMILIES = {"bert": 40, "roberta": 38, "xlm-roberta": 38, "camembert": 38, "mpnet": 38, "opt": 40}


def tiny_model(family: str) -> Any:
    more = {"word_embed_proj_dim": 8, "ffn_dim": 8} if family == "opt" else {}
    config = AutoConfig.for_model(family, **TINY, **more)
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(("family", "count"), FAMILIES.items())
def test_learned_positions_equal_the_longest_readable_sequence(family: str, count: int) -> None:
    model = tiny_model(family)
    assert learned_positions(model) == count
    with torch.no_grad():
        assert model(input_ids=torch.full((1, count), 5)).logits.isfinite().all()
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, count + 1), 5))


def test_xlnet_has_no_limit_of_positions() -> None:
    sizes = {"d_model": 8, "n_layer": 1, "n_head": 2, "d_head": 4, "d_inner": 8, "vocab_size": 300}
    config = AutoConfig.for_model("xlnet", pad_token_id=1, num_labels=1, **sizes)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    assert config.max_position_embeddings == -1 and learned_positions(model) is None
    with torch.no_grad():
        assert model(input_ids=torch.full((1, 80), 5)).logits.isfinite().all()


@pytest.mark.parametrize("is_stream", [False, True])
def test_sequence_beyond_the_learned_positions_is_rejected(is_stream: bool, tmp_path: Any) -> None:
    model, args = tiny_model("roberta"), RewardConfig(str(tmp_path), max_length=None, report_to="none")

    def built(longest: int, is_old: bool = False) -> Any:
        rows = [{"chosen_ids": [5] * length, "rejected_ids": [5]} for length in (1, longest)]
        pairs: Any = Dataset.from_list(list(map(old_columns, rows)) if is_old else rows)
        pairs = pairs.to_iterable_dataset() if is_stream else pairs
        return list(build_dataset(pairs, model, tiny_tokenizer(), args, "train", is_old))

    assert [len(row["chosen_ids"]) for row in built(38)] == [1, 38]
    for is_old in (False, True):
        with pytest.raises(UserError, match="39 tokens.*row 1 .*max_length=38"):
            built(39, is_old)
