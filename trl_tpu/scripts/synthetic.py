"""What the quickstart trains on, made on the spot, with no network and no hub: a tiny model and a preference task.

The task has a right answer, so that a held-out accuracy says whether the whole road works. A question names two
numbers and asks which is larger, or which is smaller; the chosen answer is right, the rejected answer is the other
number. An answer that is right under one question is wrong under the other, so a reward model must read the prompt and
not just rank the answers. All dialogues have the same number of tokens: a run has one shape and compiles once.
"""

import os
import random
from itertools import accumulate, combinations
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_tpu.data.loader import main_processes_first
from trl_tpu.errors import UserError

#: How the names of a model and a dataset begin that are made here.
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

Message = dict[str, Any]


def question(word: str, *numbers: int) -> list[Message]:
    """Make the prompt: one user message."""
    return [{"role": "user", "content": f"Which is {word}, {' or '.join(map(str, numbers))}?"}]


def answer(number: int) -> list[Message]:
    """Make the completion: one assistant message, the bare number."""
    return [{"role": "assistant", "content": str(number)}]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer that spells any text, and holds each word of the task as one token.

    Nothing is trained: the merges build every word from its first letter on, a longer prefix at each merge.
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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Make a causal language model of about 140,000 random float32 weights, the same at every call.

    Each dimension is a multiple of 8, so that 8 devices shard it evenly.
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
    """Make preference pairs in splits "train" (2,048) and "test" (512): prompt, chosen, rejected; conversational.

    A pair of numbers belongs to one split with all its questions, so that no test question repeats a trained
    comparison in another order or with the other word.

    Or rankings, of `RANKINGS`, in splits of the same sizes: prompt, completions and scores; a prompt names four
    numbers, and the score of each is how many of the others are a worse answer.

    Raises:
        UserError: `name` is neither.
    """
    if name == RANKINGS:
        return _rankings()
    if name != DATASET:
        raise UserError(f"There is no synthetic dataset {name!r}; there are {DATASET} and {RANKINGS}.")
    pairs = [(low, high) for low, high in combinations(NUMBERS, 2) if high - low >= SMALLEST_GAP]
    shuffler = random.Random(SEED)
    shuffler.shuffle(pairs)
    split_pairs = {
        "train": pairs[TEST_NUMBER_PAIRS : TEST_NUMBER_PAIRS + TRAIN_NUMBER_PAIRS],
        "test": pairs[:TEST_NUMBER_PAIRS],
    }
    splits = {}
    for split, number_pairs in split_pairs.items():
        rows = [
            {"prompt": question(word, *order), "chosen": answer(right), "rejected": answer(wrong)}
            for low, high in number_pairs
            for word, right, wrong in zip(QUESTION_WORDS, (high, low), (low, high), strict=True)
            for order in ((low, high), (high, low))
        ]
        shuffler.shuffle(rows)
        splits[split] = datasets.Dataset.from_list(rows)
    return datasets.DatasetDict(splits)


def _rankings() -> datasets.DatasetDict:
    chooser, rows = random.Random(SEED), []
    for word in QUESTION_WORDS * (2 * TRAIN_NUMBER_PAIRS + 2 * TEST_NUMBER_PAIRS):
        numbers = chooser.sample(NUMBERS[::SMALLEST_GAP], 4)
        scores = [
            sum((other < number) == (word == "larger") for other in numbers if other != number) for number in numbers
        ]
        rows.append({"prompt": question(word, *numbers), "completions": list(map(answer, numbers)), "scores": scores})
    test = len(rows) // 5
    return datasets.DatasetDict(
        test=datasets.Dataset.from_list(rows[:test]), train=datasets.Dataset.from_list(rows[test:])
    )


def resolve_model(name: str, folder: str) -> str:
    """Return a model's name; for ``synthetic:tiny`` the folder below `folder` where the tiny model is saved.

    Raises:
        UserError: There is no synthetic model of that name.
    """
    if not name.startswith(PREFIX):
        return name
    if name != MODEL:
        raise UserError(f"There is no synthetic model {name!r}; there is {MODEL}.")
    path = os.path.join(folder, name.replace(":", "-"))
    with main_processes_first():
        # not while another process reads it; the weights are written last, and transformers lets only rank 0
        if not os.path.exists(os.path.join(path, "model.safetensors")):
            tokenizer = tiny_tokenizer()
            tokenizer.save_pretrained(path)
            tiny_model(tokenizer).save_pretrained(path)
    return path
