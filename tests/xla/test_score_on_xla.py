"""Scoring on PyTorch/XLA gives the rewards of single conversations with few programs, on one and eight devices."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from counters import count
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

import trl_tpu
from trl_tpu.scoring import stream
from trl_tpu.scoring.scorer import Scorer

pytestmark = pytest.mark.eight

WINDOW = 24


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return rows for several windows; the second has a conversation longer than the usual row length."""
    monkeypatch.setattr(stream, "WINDOW", WINDOW)
    pairs = tiny.made_up_pairs(3 * WINDOW).to_list()
    pairs[WINDOW + 1]["chosen"] = " 2 3" * 80
    return pairs


def test_rewards_equal_single_ones_with_one_program_per_length(model_folder: str, rows: list[dict[str, Any]]) -> None:
    scorer = Scorer(model_folder, tokens_per_pass=256)
    assert scorer.device.type == "xla"
    before = count()
    seen = list(trl_tpu.score(scorer, rows))
    after = count()
    assert after.compiles - before.compiles == 2, "one program for 128 columns, one for 256"
    texts = [row["prompt"] + row[half] for row in rows for half in ("chosen", "rejected")]
    found = [row[f"reward_{half}"] for row in seen for half in ("chosen", "rejected")]
    assert found == pytest.approx(tiny.rewards_alone(model_folder, texts), abs=1e-5)

    answers = [{"prompt": row["prompt"], "completions": [row["chosen"], row["rejected"]]} for row in rows[:WINDOW]]
    before = count()
    several = list(trl_tpu.score(scorer, answers))
    after = count()
    assert [reward for row in several for reward in row["rewards"]] == pytest.approx(found[: 2 * WINDOW], abs=1e-6)
    assert after.compiles == before.compiles, "one program per row length"
    assert after.device_to_host - before.device_to_host <= after.executions - before.executions


def test_unpackable_model_is_scored_in_padded_rows_of_few_lengths(model_folder: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(tokenizer) + -len(tokenizer) % 8, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**sizes, num_labels=1)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = [row["chosen"] for row in tiny.made_up_pairs(30).to_list()]
    scorer = Scorer(str(tmp_path), tokens_per_pass=256)
    first = [row["reward"] for row in trl_tpu.score(scorer, texts)]
    assert first == pytest.approx(tiny.rewards_alone(tmp_path, texts), abs=1e-5)
    before = count().compiles
    assert [row["reward"] for row in trl_tpu.score(scorer, texts[:5])] == pytest.approx(first[:5], abs=1e-6)
    assert count().compiles == before
