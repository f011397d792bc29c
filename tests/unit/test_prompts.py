"""Pairs of one prompt are found by their tokens, stay together in an epoch, and get row shapes that fit them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from preference_rows import assistant, dataset_of, user

from trl_tpu import RewardConfig
from trl_tpu.data.collate import ComparisonRule, sequences_of
from trl_tpu.data.length_stats import group_prompts, prompt_groups, prompt_of, prompts_of
from trl_tpu.data.loader import PromptGroupSampler, prompts_in_training, sizes_by_prompt
from trl_tpu.packing.pack import pack
from trl_tpu.packing.shapes import ShapePlan
from trl_tpu.training.batch_plan import plan_shapes_of

SYSTEM = [9, 8, 7]


def ranked_pairs(prompts: int, answers: int) -> Any:
    """Pair the best answer to each prompt with every other, in random order; many answers start alike."""
    generator = np.random.default_rng(0)
    rows, prompt_N = [], np.repeat(np.arange(prompts), answers - 1)
    for _ in range(prompts):
        prompt = SYSTEM + generator.integers(10, 99, generator.integers(9, 60)).tolist()
        drawn = [generator.integers(10, 99, generator.integers(5, 30)).tolist() for _ in range(answers)]
        best, *others = ([first, *ids] for first, ids in zip((1, 1, 2, 3), drawn, strict=False))
        rows += [{"chosen_ids": prompt + best, "rejected_ids": prompt + other} for other in others]
    order = generator.permutation(len(rows))
    return Dataset.from_list([rows[at] for at in order]), prompt_N[order]


def test_pairs_of_a_prompt_form_one_group() -> None:
    dataset, prompt_N = ranked_pairs(500, 4)  # large enough to be read in two parts
    group_N = prompt_groups(dataset)
    assert sorted(set(group_N)) == list(range(500)) == sorted(set(prompt_N))
    assert len(set(zip(group_N, prompt_N, strict=True))) == 500


def test_system_prompts_and_short_shared_prompts_form_no_group() -> None:
    turn = list(range(20, 50))
    both = [
        *[([*SYSTEM, number, 1], [*SYSTEM, 9 + number, 1]) for number in range(4)],
        ([*SYSTEM, 60, 1], [*SYSTEM, 60, 2]),
        ([*SYSTEM, 60, *turn, 1], [*SYSTEM, 60, *turn, 2]),  # a second turn after the same first turn
        ([*SYSTEM, 60, 1, 2], [*SYSTEM, 60, 1, 3]),
        ([*SYSTEM, 60, *turn, 1], [*SYSTEM, 60, *turn, 1]),  # chosen and rejected are equal
    ]
    group_N = prompt_groups(dataset_of(both))
    assert len(set(group_N[:4].tolist())) == 4 and len(set(group_N.tolist())) == 6
    assert group_N[4] == group_N[6] != group_N[5] == group_N[7]


def words(text: str) -> list[int]:
    return [sum(word.encode()) for word in text.split()]


ASK, OTHER = "Is it?", "Is it not?"
ANSWERS = [("Yes, it is.", "Yes."), ("No.", "Never."), ("Yet it is.", "Yes")]
PROMPT_FORMS: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
    "prompt": lambda ask, a, b: {"prompt": ask, "chosen": a, "rejected": b},
    "texts": lambda ask, a, b: {"chosen": f"User: {ask}\nBot: {a}", "rejected": f"User: {ask}\nBot: {b}"},
    "messages": lambda ask, a, b: {"prompt": [user(ask)], "chosen": [assistant(a)], "rejected": [assistant(b)]},
    "whole": lambda ask, a, b: {half: [user(ask), assistant(c)] for half, c in (("chosen", a), ("rejected", b))},
    "system": lambda ask, a, b: {
        "prompt": [{"role": "system", "content": "Be brief."}],
        **{half: [user(ask), assistant(c)] for half, c in (("chosen", a), ("rejected", b))},
    },
    "json": lambda ask, a, b: {
        half: json.dumps([user(ask), assistant(c)]) for half, c in (("chosen", a), ("rejected", b))
    },
    "sharegpt": lambda ask, a, b: {
        "conversations": [{"from": "human", "value": ask}],
        **{half: {"from": "gpt", "value": c} for half, c in (("chosen", a), ("rejected", b))},
    },
    "ranking": lambda ask, a, b: {"prompt": ask, "completions": [a, b], "scores": [1, 0]},
    "lists": lambda ask, a, b: {"prompt": ask, "chosen": [a], "rejected": [b, b]},
    "answer": lambda ask, a, b: {"prompt": ask, "completion": a, "label": True},
    "whole answer": lambda ask, a, b: {"completion": [user(ask), assistant(a)], "label": True},
    "tokens": lambda ask, a, b: {f"{half}_ids": words(ask + " " + c) for half, c in (("chosen", a), ("rejected", b))},
}


@pytest.mark.parametrize("form", PROMPT_FORMS)
def test_rows_with_the_same_prompt_are_found_in_every_form(form: str) -> None:
    rows = [PROMPT_FORMS[form](ask, *answers) for ask in (ASK, OTHER) for answers in ANSWERS]
    dataset = Dataset.from_list(rows).add_column("id", list(range(6)))
    assert group_prompts(prompts_of(dataset)).tolist() == [0, 0, 0, 1, 1, 1]
    if form != "tokens":
        assert group_prompts([prompt_of(row) or b"" for row in rows]).tolist() == [0, 0, 0, 1, 1, 1]
        shared = set(group_prompts([prompt_of(row) or b"" for row in rows[:3]]))
        assert len(shared) == (3 if form == "texts" else 1)  # a text that all rows begin with may be a system prompt


def test_rows_without_a_prompt_have_groups_of_their_own() -> None:
    rows: list[dict[str, Any]] = [{"chosen": "a b", "rejected": "c"}, {"chosen": "d", "rejected": "e"}]
    rows += [{"reward_chosen": None, "not_scored": "line 3"}, {"prompt": None, "chosen": [], "rejected": "b"}]
    rows += [{"prompt": 5, "chosen": [user("a")], "rejected": [user("b")]}, {"prompt": {}, "chosen": [None, 1]}]
    assert group_prompts([prompt_of(row) or b"" for row in rows]).tolist() == [0, 1, 2, 3, 4, 5]


def test_order_permutes_pairs_and_keeps_groups_together() -> None:
    group_N = np.repeat(np.arange(40), 3)[np.random.default_rng(0).permutation(120)]
    orders = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        sampler = PromptGroupSampler(group_N, 9, seed)
        sampler.set_epoch(epoch)
        orders[seed, epoch] = list(sampler)
    assert all(sorted(order) == list(range(120)) for order in orders.values())
    assert len(set(map(tuple, orders.values()))) == 4
    for order in orders.values():
        updates = [set(group_N[order[first : first + 9]]) for first in range(0, 120, 9)]
        assert [len(groups) for groups in updates] == [3] * 13 + [1]  # only the last update is short
    sampler = PromptGroupSampler(group_N, 9, 0)  # without a call of set_epoch
    assert [list(sampler) for _ in range(2)] == [orders[0, 0], orders[0, 1]] and len(sampler) == 120


def test_updates_of_one_large_group_are_not_consecutive() -> None:
    group_N = np.array([0] * 100 + list(range(1, 301)))
    order = np.array(list(PromptGroupSampler(group_N, 10)))
    filled = np.flatnonzero((group_N[order].reshape(-1, 10) == 0).all(axis=1))
    assert 9 <= len(filled) <= 10 and np.diff(filled).max() > 3


@pytest.mark.parametrize(("pairs", "shards"), [(8, 1), (32, 8)])
def test_planned_rows_hold_any_batch_and_fit_grouped_batches(pairs: int, shards: int, tmp_path: Path) -> None:
    dataset, _ = ranked_pairs(150, 4)
    args, order_N = (
        RewardConfig(str(tmp_path), report_to="none"),
        list(PromptGroupSampler(prompt_groups(dataset), pairs)),
    )
    grouped_sizes = sizes_by_prompt(dataset, pairs)
    plans = [plan_shapes_of(dataset, 512, pairs, shards, args, sizes_N=sizes) for sizes in (None, grouped_sizes)]

    def columns(plan: ShapePlan, order: Any) -> int:
        packed = 0
        for first in range(0, len(order), pairs):
            batch = list(dataset.select(order[first : first + pairs]))
            rows = pack(sequences_of(batch, 0, ComparisonRule().table(batch, pairs)), plan)
            packed += sum(each.input_ids_RL.size for each in rows)
        return packed

    plain, grouped = (columns(plan, order_N) for plan in plans)
    assert grouped < 0.85 * plain
    largest = np.argsort([len(row["chosen_ids"]) for row in dataset])[::-1]  # type: ignore[call-overload]
    assert columns(plans[1], largest.tolist()) > 0 < columns(plans[1], list(range(len(dataset))))


def test_streams_cannot_be_grouped_by_prompt() -> None:
    with pytest.raises(ValueError, match="group_by_prompt"):
        sizes_by_prompt(ranked_pairs(4, 2)[0].to_iterable_dataset(), 4)


ROWS = [{"prompt": f"What is {n}?", "chosen_ids": [1], "rejected_ids": [2]} for n in range(6)]
IDS = [[*range(10 * n, 10 * n + 9)] for n in range(1, 7)]
AS_IDS = [{"chosen_ids": [1, *ids, 5], "rejected_ids": [1, *ids, 6]} for ids in IDS]


OVERLAPS = [
    (ROWS[:4], ROWS[2:] + ROWS[3:], (2, 4)),  # counts distinct prompts
    ([row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS], ROWS[:1], (0, 1)),
    (AS_IDS[:4], AS_IDS[2:], (2, 4)),
    ([row | {"prompt": ""} for row in ROWS], [row | {"prompt": ""} for row in ROWS], (0, 0)),
    ([row | {"prompt": "Choose."} for row in ROWS], [row | {"prompt": "Choose."} for row in ROWS], (0, 1)),
    ([{"chosen_ids": [1, n], "rejected_ids": [1, 9]} for n in (5, 6)], AS_IDS, (0, 6)),
    (ROWS, [{"prompt": "What is 1?", "chosen": "yes", "rejected": "no"}], ()),  # rows that are not tokenized
]


@pytest.mark.parametrize(("train", "evaluation", "expected"), OVERLAPS)
def test_prompts_in_both_datasets_are_counted(train: Any, evaluation: Any, expected: Any, caplog: Any) -> None:
    found = prompts_in_training(Dataset.from_list(train), Dataset.from_list(evaluation), "held out")
    assert found == expected
    assert ("'held out'" in caplog.text) is bool(expected and expected[0])
