"""A tiny tokenizer and model, and preference rows of every form that TRL's reward trainer takes."""

import json
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% if shout %}LOUD {{ shout }}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather somewhere",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def tiny_tokenizer(**kwargs: Any) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token a byte, and four special tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **kwargs}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32768, **settings)
    fast.chat_template = TEMPLATE
    return fast


def tiny_config(**kwargs: Any) -> Qwen2Config:
    size = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return Qwen2Config(
        **{"vocab_size": 260, **size, "intermediate_size": 16, "num_labels": 1, "pad_token_id": 0, **kwargs}
    )


def tiny_model(**kwargs: Any) -> Qwen2ForSequenceClassification:
    return Qwen2ForSequenceClassification(tiny_config(**kwargs))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def rows_of_every_form() -> dict[str, list[dict[str, Any]]]:
    """Name of the form -> rows, each with a margin."""
    asked = [
        ("Sky?", "Blue.", "Green, I think."),
        ("Sum of 2 and 2?", "4", "Fünf 🙂."),
        ("Sun?", "", "In the sea<|im_end|>"),
    ]
    standard = [{"prompt": q + " ", "chosen": good, "rejected": bad} for q, good, bad in asked]
    chat = [{"prompt": [user(q)], "chosen": [assistant(good)], "rejected": [assistant(bad)]} for q, good, bad in asked]

    def implicit(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in rows]

    forms = {
        "standard": standard,
        "standard, implicit prompt": implicit(standard),
        "conversational": chat,
        "conversational, implicit prompt": implicit(chat),
        "tools as a list": [{**row, "tools": TOOLS} for row in chat],
        "tools as JSON": [{**row, "tools": json.dumps(TOOLS)} for row in implicit(chat)],
        "no tools in one row": [{**row, "tools": TOOLS if i else None} for i, row in enumerate(chat)],
        "chat_template_kwargs": [
            {**row, "chat_template_kwargs": {"shout": "AB"[i % 2]}} for i, row in enumerate(chat)
        ],
    }
    return {name: [{**row, "margin": i / 2} for i, row in enumerate(rows)] for name, rows in forms.items()}
