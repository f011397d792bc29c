"""How other programs load a saved reward model and read its reward, each by its own rules.

They take token ids, or texts where they tokenize by themselves, and return a reward of each.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline
from transformers.utils import find_adapter_config_file

from trl_tpu.modeling.outputs import BASE_CONFIG

Ids = list[list[int]]


def load(folder: str) -> Any:
    """Load as anybody does; adapters with the config beside them."""
    return AutoModelForSequenceClassification.from_pretrained(folder, **_config(folder)).eval()


def padded(ids: Ids, pad_token_id: int, side: str = "right") -> dict[str, torch.Tensor]:
    longest = max(map(len, ids))

    def filled(row: list[int], value: int) -> list[int]:
        rest = [value] * (longest - len(row))
        return row + rest if side == "right" else rest + row

    mask = [filled([1] * len(row), 0) for row in ids]
    return {
        "input_ids": torch.tensor([filled(row, pad_token_id) for row in ids]),
        "attention_mask": torch.tensor(mask),
    }


@torch.no_grad()
def transformers_rewards(folder: str, ids: Ids, side: str) -> list[float]:
    model = load(folder)
    return model(**padded(ids, model.config.pad_token_id, side)).logits.squeeze(-1).tolist()


def pipeline_rewards(folder: str, texts: list[str], **tokenizing: Any) -> list[float]:
    """The default pipeline, which applies a sigmoid to one label of a config that does not say regression."""
    model = load(folder) if _config(folder) else folder  # a pipeline reads adapters by their base model's config
    read = pipeline("text-classification", model=model, tokenizer=folder, device="cpu")
    return [each["score"] for each in read(texts, **tokenizing)]


@torch.no_grad()
def last_token_rewards(folder: str, ids: Ids) -> list[float]:
    """As vLLM and SGLang pool: the very last token, whatever it is."""
    model = load(folder)
    backbone = getattr(model, model.base_model_prefix)
    return [model.score(backbone(torch.tensor([row])).last_hidden_state[0, -1]).item() for row in ids]


@torch.no_grad()
def openrlhf_rewards(folder: str, ids: Ids, pad_token_id: int, normalizes: bool) -> list[float]:
    """As OpenRLHF's `get_llm_for_sequence_regression`: the backbone, a head named ``score``, config's mean and std.

    https://github.com/OpenRLHF/OpenRLHF/blob/main/openrlhf/models/model.py
    """
    config = AutoConfig.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    assert isinstance(model.score, torch.nn.Linear) and model.score.bias is None
    batch = padded(ids, pad_token_id, "left")
    mask = batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    hidden = getattr(model, model.base_model_prefix)(**batch, position_ids=positions).last_hidden_state
    rewards = model.score(hidden)[:, -1, 0]  # padding is on the left, so the last token is the dialogue's
    if normalizes:
        rewards = (rewards - config.mean) / config.std
    return rewards.tolist()


@torch.no_grad()
def rewardbench_rewards(folder: str, texts: list[str]) -> list[float]:
    """As rewardbench 0.1.4: padding on the left, and the first of two BOS tokens hidden from attention.

    https://github.com/allenai/reward-bench/blob/main/rewardbench/models/pipeline.py
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder)
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    starts = batch["attention_mask"].argmax(-1)
    for row, start in enumerate(starts.tolist()):
        first = batch["input_ids"][row, start : start + 2].tolist()
        if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] * 2:
            batch["attention_mask"][row, start] = 0
    return model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1).tolist()


def _config(folder: str) -> dict[str, Any]:
    if find_adapter_config_file(folder) is None:
        return {}
    return {"config": AutoConfig.from_pretrained(str(Path(folder, BASE_CONFIG)))}
