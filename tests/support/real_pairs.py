"""Pairs of realistic lengths: made up from a seed on every machine, or real ones if their file exists.

Training and packing depend on the lengths of sequences and of shared prefixes, not on words. The lengths of made-up
pairs are drawn from those measured on real ones: the 2,312 test pairs of HH-RLHF's harmless-base split
(https://arxiv.org/abs/2204.05862), in tokens of an 8,000-token byte-level BPE trained on them.
"""

import gzip
import json
import math
import os
from pathlib import Path

import numpy as np
import tiny
from datasets import Dataset

REAL_FILE = (
    Path(os.environ.get("TRL_TPU_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
    / "hh_harmless_test.jsonl.gz"
)
SOURCES = ["made up", "real"] if REAL_FILE.exists() else ["made up"]
COUNT = 2312

# Tokens at these percentiles: of the shared prefix, of the rest of the chosen sequence, and of the rejected one.
PERCENTILES = [0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100]
LENGTHS = [
    [11, 13, 16, 19, 34, 98, 171, 277, 354, 541, 846],
    [1, 2, 6, 8, 15, 28, 54, 91, 122, 203, 280],
    [1, 2, 6, 9, 18, 36, 67, 113, 149, 260, 580],
]
CORRELATION = 0.25  # between the logarithms of any two of the lengths


def real_pairs(count: int = COUNT) -> Dataset:
    """Return the first rows of the real data: plain text with an implicit prompt."""
    with gzip.open(REAL_FILE, "rt", encoding="utf-8") as file:
        return Dataset.from_list([json.loads(line) for line, _ in zip(file, range(count), strict=False)])


def pairs_from(source: str, count: int = COUNT) -> Dataset:
    """Return the first rows of one of ``SOURCES``."""
    return real_pairs(count) if source == "real" else made_up_dialogues(count)


def best_pairs(count: int = COUNT) -> Dataset:
    """Return the first real rows, or made-up rows of their lengths if the file is missing, for benchmarks."""
    return pairs_from(SOURCES[-1], count)


def tokenized(rows: Dataset) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of the pairs with sequences of at most 1,024 tokens."""
    tokenizer = tiny.tiny_tokenizer([*rows["chosen"][:400], *rows["rejected"][:400]])
    halves = (tokenizer(list(rows[half]))["input_ids"] for half in ("chosen", "rejected"))
    return [pair for pair in zip(*halves, strict=True) if max(map(len, pair)) <= 1024]


def drawn_lengths(chooser: np.random.Generator) -> list[int]:
    """Draw the tokens of a shared prefix, of the rest of the chosen sequence and of the rejected one."""
    normal = CORRELATION**0.5 * chooser.normal() + (1 - CORRELATION) ** 0.5 * chooser.normal(size=3)
    places = 50 * (1 + np.vectorize(math.erf)(normal / 2**0.5))
    return [round(np.interp(place, PERCENTILES, lengths)) for place, lengths in zip(places, LENGTHS, strict=True)]


def made_up_dialogues(count: int = COUNT) -> Dataset:
    """Return pairs of made-up words in the format and the lengths of the real ones.

    The sequences of a pair share a prefix and end with different words and lengths. The vocabulary is small enough
    that a tokenizer trained on these pairs has one token per word.
    """
    chooser = np.random.default_rng(0)
    words = [first + second for first in _SYLLABLES for second in _SYLLABLES]
    frequency = 1 / np.arange(1, len(words) + 1)  # Zipf's law
    frequency /= frequency.sum()

    def text(tokens: int) -> str:
        return "".join(f" {words[index]}" for index in chooser.choice(len(words), tokens, p=frequency))

    rows = []
    for _ in range(count):
        shared, chosen, rejected = drawn_lengths(chooser)
        prefix = f"\n\nHuman:{text(shared - 9)}\n\nAssistant:"  # nine tokens are fixed
        rows.append({"chosen": prefix + text(chosen), "rejected": prefix + text(rejected)})
    return Dataset.from_list(rows)


_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
