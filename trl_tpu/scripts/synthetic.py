"""The quickstart's tiny model and preference task, generated locally without network or Hub.

The task has a right answer, so the held-out accuracy shows whether the whole pipeline works. A question names two
numbers and asks for the larger or the smaller number. The chosen answer is the right number, the rejected answer the
wrong number. An answer that is right for one question is wrong for the opposite question, so a reward model must read
the prompt and not just rank the answers. All sequences have the same number of tokens: a run has one shape and
compiles once.
"""

import os
import random
from itertools import accumulate, combinations
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_tpu.data.tokenize import main_processes_first
from trl_tpu.errors import UserError

#: Prefix of the names of synthetic models and datasets.
PREFIX = "synthetic:"
MODEL, DATASET, RANKINGS = f"{PREFIX}tiny", f"{PREFIX}numbers", f"{PREFIX}rankings"
SEED = 0

NUMBERS = range(10, 50)
SMALLEST_GAP = 4
QUESTION_WORDS = ("larger", "smaller")
# Each pair of numbers gives 4 questions (2 words, 2 orders): 2,048 to train on and 512 to test on.
TRAIN_NUMBER_PAIRS, TEST_NUMBER_PAIRS = 512, 128

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def question(word: str, *numbers: int) -> list[dict[str, Any]]:
    """Make a prompt: one user message."""
    return [{"role": "user", "content": f"Which is {word}, {' or '.join(map(str, numbers))}?"}]


def answer(number: int) -> list[dict[str, Any]]:
    """Make a completion: one assistant message with only the number."""
    return [{"role": "assistant", "content": str(number)}]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer for any text, with one token for each word of the task.

    Nothing is trained: the merges build each word letter by letter, from its beginning.
    """
    words = ["Which", "is", "or", *QUESTION_WORDS, *map(str, NUMBERS)]
    prefixes = dict.fromkeys(prefix for word in words for prefix in accumulate(["Ġ", *word]))
    merges = [(prefix[:-1], prefix[-1]) for prefix in prefixes if len(prefix) > 1]
    specials = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokens = dict.fromkeys([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *prefixes])
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    names = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names)


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Make a causal language model of 123,200 random float32 weights, the same at every call.

    Each dimension is a multiple of 8, so 8 devices can shard it evenly.
    """
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return LlamaForCausalLM(config)


def load_dataset(name: str) -> datasets.DatasetDict:
    """Make conversational preference pairs or rankings, in the splits "train" (2,048 rows) and "test" (512 rows).

    `DATASET` has pairs: prompt, chosen and rejected. All questions about a pair of numbers are in one split, so no
    test question repeats a comparison of the training data in another order or with the opposite word.

    `RANKINGS` has prompt, completions and scores. A prompt names four numbers; the score of a number is how many of
    the numbers are worse answers.

    Raises:
        UserError: `name` is not `DATASET` or `RANKINGS`.
    """
    if name not in (DATASET, RANKINGS):
        raise UserError(f"Unknown synthetic dataset {name!r}; the names are {DATASET} and {RANKINGS}.")
    chooser = random.Random(SEED)
    if name == RANKINGS:
        tests, count = 2 * TEST_NUMBER_PAIRS, 2 * (TRAIN_NUMBER_PAIRS + TEST_NUMBER_PAIRS)
        rankings = [_ranking(word, chooser.sample(NUMBERS[::SMALLEST_GAP], 4)) for word in QUESTION_WORDS * count]
        splits = {"test": rankings[: 2 * tests], "train": rankings[2 * tests :]}
    else:
        pairs = [(low, high) for low, high in combinations(NUMBERS, 2) if high - low >= SMALLEST_GAP]
        chooser.shuffle(pairs)
        end = TEST_NUMBER_PAIRS + TRAIN_NUMBER_PAIRS
        splits = {"train": _pairs(pairs[TEST_NUMBER_PAIRS:end]), "test": _pairs(pairs[:TEST_NUMBER_PAIRS])}
        for rows in splits.values():
            chooser.shuffle(rows)
    return datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()})


def _pairs(number_pairs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    return [
        {"prompt": question(word, *order), "chosen": answer(right), "rejected": answer(wrong)}
        for low, high in number_pairs
        for word, right, wrong in zip(QUESTION_WORDS, (high, low), (low, high), strict=True)
        for order in ((low, high), (high, low))
    ]


def _ranking(word: str, numbers: list[int]) -> dict[str, Any]:
    scores = [[*sorted(numbers, reverse=word == "smaller")].index(number) for number in numbers]
    return {"prompt": question(word, *numbers), "completions": list(map(answer, numbers)), "scores": scores}


def resolve_model(name: str | None, folder: str) -> str:
    """Return a model's name; for ``synthetic:tiny``, save the tiny model inside `folder` and return its path.

    Raises:
        UserError: No name is given.
    """
    if not name:
        raise UserError(f"Name a model with `--model_name_or_path`: a Hub id, a local folder, or {MODEL}.")
    if name != MODEL:
        return name
    path = os.path.join(folder, name.replace(":", "-"))
    with main_processes_first():
        # Never overwrite the model: another process may be reading it. Only rank 0 writes, the weights last.
        if not os.path.exists(os.path.join(path, "model.safetensors")):
            tokenizer = tiny_tokenizer()
            tokenizer.save_pretrained(path)
            tiny_model(tokenizer).save_pretrained(path)
    return path
