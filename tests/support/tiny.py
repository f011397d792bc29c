"""Tiny models, tokenizers and datasets for tests: created from a seed, without a hub."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification, PreTrainedTokenizerFast, set_seed


def made_up_pairs(count: int, seed: int = 0, margin: bool = False) -> Dataset:
    """Return pairs of different lengths with explicit prompts; the chosen answer counts on, the rejected does not."""
    chooser = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        start, length = chooser.randrange(50), chooser.randrange(2, 9)
        counted = [str(start + step) for step in range(1, length)]
        shuffled = " ".join(chooser.sample(counted, len(counted))) + " stop" * chooser.randrange(1, 3)
        row = {"prompt": f"Count on from {start}:", "chosen": " " + " ".join(counted), "rejected": f" {shuffled}"}
        rows.append(row | ({"margin": chooser.random()} if margin else {}))
    return Dataset.from_list(rows)


def uneven_pairs(count: int, seed: int = 0, margin: bool = False) -> Dataset:
    """Return made-up pairs; every fifth is many times longer, so that batches differ in size."""
    rows = made_up_pairs(count, seed, margin).to_list()
    for index, row in enumerate(rows):
        row["prompt"] = f"{index} " + row["prompt"] * (1 + 8 * (index % 5 == 0) + 4 * (index % 9 == 0))
    return Dataset.from_list(rows)


def made_up_rankings(count: int, most: int = 5, seed: int = 0) -> Dataset:
    """Return prompts with 2 to ``most`` answers; better answers count further before they stop."""
    chooser = random.Random(seed)

    def row() -> dict[str, Any]:
        start, answers = chooser.randrange(50), chooser.randrange(2, most + 1)
        scores = chooser.sample(range(8), answers)
        texts = [" " + " ".join(["on"] * score + ["stop"] * (8 - score)) for score in scores]
        return {"prompt": f"Count on from {start}:", "completions": texts, "scores": [float(each) for each in scores]}

    return Dataset.from_list([row() for _ in range(count)])


def texts_in(data: Any) -> Iterator[str]:
    """Yield every text of a dataset, or of nested lists and dictionaries."""
    for each in data.values() if isinstance(data, dict) else data:
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict | list):
            yield from texts_in(each)


def tiny_tokenizer(texts: Any, vocab_size: int = 2000) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on all ``texts``, with a pad token and a plain chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<pad>", "<eos>"]
    how = {"vocab_size": vocab_size, "special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(list(texts_in(texts)), trainers.BpeTrainer(**how))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    return fast


def tiny_model(tokenizer: Any, hidden: int = 32, layers: int = 2, **config: Any) -> LlamaForSequenceClassification:
    """Return a random Llama reward model with dimensions divisible by 8 devices."""
    set_seed(0)
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    sizes |= {"vocab_size": len(tokenizer) + -len(tokenizer) % 8, "num_labels": 1}
    return LlamaForSequenceClassification(transformers.LlamaConfig(**sizes | special_tokens(tokenizer) | config))


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}


def save_tiny(folder: Path, texts: Any, hidden: int = 32, layers: int = 2, **config: Any) -> str:
    """Save a tiny model and its tokenizer in ``folder``, like a Hub checkpoint."""
    tokenizer = tiny_tokenizer(texts)
    tiny_model(tokenizer, hidden, layers, **config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_grouped": {"num_key_value_heads": 4},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 56},
    "llama_lora": {},
}


def tiny_family(
    name: str, tokenizer: Any, outputs: int = 1, auto: Any = transformers.AutoModelForSequenceClassification
) -> transformers.PreTrainedModel:
    """Return a random model whose program shows what each array is.

    Every feature dimension is a multiple of 7, also after division over eight devices. The numbers of experts and of
    tokens in the vocabulary are not, and tests use no number or length of rows that is.
    """
    sizes: dict[str, Any] = {"vocab_size": 328, "hidden_size": 56, "intermediate_size": 168, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 14, "max_position_embeddings": 512}
    model_type = name.removesuffix("_lora").removesuffix("_grouped")
    settings = sizes | special_tokens(tokenizer) | {"num_labels": outputs} | FAMILIES[name]
    config = AutoConfig.for_model(model_type, **settings)
    set_seed(0)
    return auto.from_config(config)


def rewards_alone(folder: Path | str, dialogues: list[Any], dtype: torch.dtype = torch.float32) -> list[float]:
    """Return reference rewards: transformers' model in plain torch, one conversation at a time, without padding."""
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)  # families have different tokenizer classes
    rewards = []
    for dialogue in dialogues:
        is_text = isinstance(dialogue, str)
        text = dialogue + "<eos>" if is_text else "".join(f"{m['role']}: {m['content']}\n" for m in dialogue)
        with torch.inference_mode():
            rewards.append(model(torch.tensor([tokenizer(text)["input_ids"]])).logits.item())
    return rewards
