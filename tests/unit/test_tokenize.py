"""Token pairs equal TRL 1.16's for every format of preference data, and TRL 0.23's for the old columns."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import trl
from datasets import Dataset
from environment import ROOT, SUPPORT
from hypothesis import given, settings
from hypothesis import strategies as st
from preference_rows import assistant, prepare, rows_of_every_format, tiny_model, tiny_tokenizer, write_jsonl

from trl_tpu.compat.old_trl import OldPairs, with_current_names
from trl_tpu.data.kinds import Pairs
from trl_tpu.data.trl_dict import old_columns

FORMS = rows_of_every_format()


def trl_train_dataset(dataset: Any, tmp_path: Path, **kwargs: Any) -> Any:
    """Return the dataset as prepared by TRL's trainer."""
    args = trl.RewardConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=1, **kwargs)
    given = {"train_dataset": dataset, "processing_class": tiny_tokenizer()}
    return trl.RewardTrainer(tiny_model(), args, **given).train_dataset


def pairs_in(dataset: Any) -> list[list[list[int]]]:
    """Return the token ids of each row's answers."""
    return [[row["chosen_ids"], row["rejected_ids"]] for row in dataset]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_limited", [False, True])
def test_token_pairs_equal_trls_also_for_streams(form: str, is_limited: bool, tmp_path: Path) -> None:
    rows, limit = FORMS[form], 60 if form in ("standard", "conversational") else 400
    max_length = limit if is_limited else None
    dataset = Dataset.from_list(rows)
    theirs = trl_train_dataset(dataset, tmp_path, max_length=max_length)
    ours = prepare(dataset, max_length=max_length)
    assert len(theirs) > 0
    for column in ("chosen_ids", "rejected_ids", "margin"):
        assert ours[column][:] == theirs[column][:]
    for stream in (dataset.to_iterable_dataset(), rows):
        assert pairs_in(prepare(stream, None, True, max_length=max_length)) == pairs_in(ours)


def test_stream_may_mix_texts_and_messages() -> None:
    forms = [FORMS[f"{form}, implicit prompt"][0] for form in ("standard", "conversational")]
    rows = [*forms, *reversed(forms)]
    assert pairs_in(prepare(rows, streaming=True)) == pairs_in([prepare([row])[0] for row in rows])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.text(max_size=12)] * 3), min_size=1, max_size=5))
def test_text_is_tokenized_as_prompt_answer_and_one_eos(triples: list[tuple[str, str, str]]) -> None:
    tokenizer = tiny_tokenizer()
    rows = [{"prompt": p + ".", "chosen": c + "+", "rejected": f"{r}-{tokenizer.eos_token}"} for p, c, r in triples]
    ours = prepare(Dataset.from_list(rows))
    for row, (chosen, rejected) in zip(rows, pairs_in(ours), strict=True):
        assert chosen == tokenizer(row["prompt"] + row["chosen"] + tokenizer.eos_token)["input_ids"]
        assert rejected == tokenizer(row["prompt"] + row["rejected"])["input_ids"]


def test_user_columns_are_kept() -> None:
    rows = [{**row, "id": i} for i, row in enumerate(FORMS["standard"])]
    assert prepare(rows).remove_columns(["chosen_ids", "rejected_ids"]).to_list() == rows


PREPARE_FROM_DISK = """
import json, sys
from datasets import Dataset, Features, Sequence, Value
from preference_rows import prepare, tiny_tokenizer
from trl_tpu.data import tokenize
from trl_tpu.data.kinds import Solutions
root, folder = sys.argv[1:]
assert tokenize.__file__.startswith(root)
rows = Dataset.from_json(f"{folder}/rows.jsonl", cache_dir=folder)
pairs = prepare(rows.select_columns(["chosen", "rejected"]), max_length=4, truncation_mode="keep_end")
steps = rows.select_columns(["prompt", "completions", "labels"])
steps = prepare(steps, kinds=[Solutions("!")])
print(json.dumps([pairs["chosen_ids"][:], steps["input_ids"][:]]))
"""


def test_cached_tokens_are_reused_until_the_code_changes(tmp_path: Path) -> None:
    root, folder = tmp_path / "copy", tmp_path / "rows"
    shutil.copytree(ROOT / "trl_tpu", root / "trl_tpu", ignore=shutil.ignore_patterns("__pycache__"))
    row = {"chosen": "good one", "rejected": "very bad", "prompt": "2+2", "completions": ["4"], "labels": [1]}
    write_jsonl(folder / "rows.jsonl", [row])
    path = os.pathsep.join(map(str, (root, ROOT, SUPPORT)))

    def prepared() -> tuple[list[str], set[Path]]:
        environment = {"PYTHONPATH": path, subprocesses.ONLY: "transformers.trainer"}
        output = subprocesses.run("-c", PREPARE_FROM_DISK, str(root), str(folder), **environment).stdout
        texts = [tiny_tokenizer().decode(ids) for (ids,) in json.loads(output.splitlines()[-1])]
        return texts, set(folder.rglob("cache-*.arrow"))

    texts, files = prepared()
    assert texts == ["one<|im_end|>", "2+24!"] and len(files) == 3  # one file per map: tokens, truncated pairs, steps
    assert prepared() == (texts, files)
    changes = [("kinds/base", "dialogue + eos", "dialogue + '?'"), ("kinds/solutions", "ids + sep", "ids + ids + sep")]
    for name, old, new in changes:
        module = root / "trl_tpu" / "data" / f"{name}.py"
        assert module.read_text().count(old) == 1
        module.write_text(module.read_text().replace(old, new))
    new_texts, new_files = prepared()
    assert new_texts == ["one?", "2+244!"] and len(new_files - files) == 3


def test_token_ids_pass_through_and_are_filtered() -> None:
    dataset = Dataset.from_dict({"chosen_ids": [[1, 2], [3]], "rejected_ids": [[4], [5, 6, 7]], "margin": [1, 2]})
    prepared = prepare(dataset, max_length=2)
    assert prepared[:] == {"chosen_ids": [[1, 2]], "rejected_ids": [[4]], "margin": [1]}
    streamed = prepare(dataset.to_iterable_dataset(), max_length=2)
    assert list(streamed) == [{"chosen_ids": [1, 2], "rejected_ids": [4], "margin": 1}]


LONG = [  # pair, kept start and kept end of each sequence; None if the truncated answers would be equal
    (([1, 2, 3], [1, 2]), ([1, 2, 3], [1, 2]), ([1, 2, 3], [1, 2])),
    (([1, 2, 3, 4, 5], [1, 2, 6]), ([1, 2, 3, 4], [1, 2, 6]), ([2, 3, 4, 5], [2, 6])),
    (([1, 2, 3, 4, 5, 6, 7], [1, 2, 8]), ([1, 2, 3, 4], [1, 2, 8]), None),  # keep_end drops the whole shorter answer
    (([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7]), None, ([3, 4, 5], [3, 4, 6, 7])),
    (([5, 1, 2, 3, 4], [6, 1, 2, 3, 4]), ([5, 1, 2, 3], [6, 1, 2, 3]), None),
    (([9] * 5, [9] * 5), None, None),
]


@pytest.mark.parametrize("are_old", [False, True])
@pytest.mark.parametrize(("mode", "which"), [("keep_start", 1), ("keep_end", 2)])
def test_pairs_are_truncated_together(mode: str, which: int, are_old: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Shared tokens stay shared, and margins stay with their pairs."""
    rows: list[Any] = [dict(zip(Pairs.columns, case[0], strict=True)) | {"margin": at} for at, case in enumerate(LONG)]
    dataset = Dataset.from_list(list(map(old_columns, rows)) if are_old else rows)
    expected = {at: [*case[which]] for at, case in enumerate(LONG) if case[which]}
    settings: Any = {"max_length": 4, "truncation_mode": mode}
    settings |= {"kinds": [OldPairs(tiny_tokenizer())]} if are_old else {}
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        made = prepare(dataset, **settings)
    for found in (list(made), list(prepare(dataset.to_iterable_dataset(), **settings))):
        assert dict(zip([row["margin"] for row in found], pairs_in(found), strict=True)) == expected
        assert all(row.keys() == {"chosen_ids", "rejected_ids", "margin"} for row in found)
    dropped = len(LONG) - len(expected)
    assert f"{5 - dropped} of 6 pairs" in caplog.text and f"{dropped} of 6 pairs" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_old_token_columns_are_renamed_with_trls_warning(streaming: bool) -> None:
    dataset: Any = Dataset.from_dict({"chosen_input_ids": [[1, 2]], "rejected_input_ids": [[4]]})
    with pytest.warns(FutureWarning, match="chosen_input_ids"):
        dataset = with_current_names(dataset.to_iterable_dataset() if streaming else dataset)
    assert next(iter(prepare(dataset))) == {"chosen_ids": [1, 2], "rejected_ids": [4]}


def test_tokenizer_without_eos_adds_none() -> None:
    prepared = prepare([{"chosen": "a", "rejected": "bc"}], tiny_tokenizer(eos_token=None))
    assert [len(prepared["chosen_ids"][0]), len(prepared["rejected_ids"][0])] == [1, 2]


def trl_0_23(dataset: Dataset, tokenizer: Any) -> list[list[list[int]]]:
    """Return the token ids from the two maps of TRL 0.23's trainer, row by row."""
    rows = [trl.data_utils.maybe_apply_chat_template(row, tokenizer) for row in dataset]  # type: ignore[arg-type]
    return [[tokenizer(row[half])["input_ids"] for half in ("chosen", "rejected")] for row in rows]


@pytest.mark.parametrize(
    "form", [f"{kind}{end}" for kind in ("standard", "conversational") for end in ("", ", implicit prompt")]
)
def test_old_columns_equal_those_of_trl_0_23(form: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**row, "margin": [row["margin"]]} for row in FORMS[form][:2]]
    data, tokenizer = Dataset.from_list(rows), tiny_tokenizer()
    prepared, streamed = (prepare(each, kinds=[OldPairs(tokenizer)]) for each in (data, data.to_iterable_dataset()))
    assert pairs_in(prepared) == trl_0_23(data, tokenizer)
    assert prepared["margin"][:] == [row["margin"] for row in FORMS[form][:2]]
    assert list(streamed) == list(prepared)
    assert ("`prompt`" in caplog.text) == ("implicit" not in form)  # an explicit prompt is dropped with a warning


def of_each(written: str) -> str:
    return f"{{% for message in messages %}}{{{{ message['role'] }}}}: {written};{{% endfor %}}"


TEXT = "{{ message['content'] }}"
PARTS = "{% for part in message['content'] %}<{{ part['text'] }}>{% endfor %}"
AFTER_USER = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}"
READS_TEXT = {
    "prints the content": TEXT,
    "trims the content": "{{ message['content'] | trim }}",
    "concatenates the content": "{{ 'x' + message['content'] }}",
    "calls a string method": "{{ message['content'].split('</think>')[-1] }}",
    "skips non-text": "{% if message['content'] is string %}" + TEXT + "{% endif %}",
    "begins with a user": AFTER_USER + TEXT,
}
READS_PARTS = {
    "parts": PARTS,
    "parts and text": "{% if message['content'] is string %}" + TEXT + "{% else %}" + PARTS + "{% endif %}",
    "parts after a user": AFTER_USER + PARTS,
    "JSON": "{{ message['content'] | tojson }}",
}


def in_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def dialogue_of(*contents: Any) -> list[dict[str, Any]]:
    """Return messages of user and assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def tokenizer_with(template: str) -> Any:
    tokenizer = tiny_tokenizer(bos_token="<|begin|>")
    tokenizer.chat_template = template
    return tokenizer


def rendered(template: str, *contents: Any) -> str:
    """Return the text of the first chosen answer after preparation."""
    dialogue, tokenizer = dialogue_of(*contents), tokenizer_with(template)
    (row,) = prepare(Dataset.from_list([{"chosen": dialogue, "rejected": dialogue * 2}]), tokenizer)
    return tokenizer.decode(row["chosen_ids"])


@pytest.mark.parametrize("template", READS_TEXT.values(), ids=READS_TEXT)
def test_text_parts_are_joined_for_templates_that_read_text(template: str) -> None:
    joined = rendered(of_each(template), "Hello", "you")
    assert "Hello" in joined == rendered(of_each(template), in_parts("Hel", "lo"), in_parts("you"))
    assert rendered(of_each(template), in_parts("Hello"), in_parts()) == rendered(of_each(template), "Hello", "")


@pytest.mark.parametrize("template", READS_PARTS.values(), ids=READS_PARTS)
def test_templates_that_read_parts_get_them(template: str) -> None:
    contents = in_parts("Hel", "lo"), in_parts("you")
    expected = tokenizer_with(of_each(template)).apply_chat_template(dialogue_of(*contents), tokenize=False)
    assert "Hel" in expected and "Hello" not in expected and "'Hel'" not in expected
    assert rendered(of_each(template), *contents) == expected


@pytest.mark.parametrize("name", ["llama3", "phi3", "qwen2_5_vl", "qwen3", "smolvlm", "llava_next"])
def test_published_templates_render_text_and_parts_equally(name: str) -> None:
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    text = rendered(template, "Hello", "you")
    assert text == rendered(template, in_parts("Hello"), in_parts("you"))
    assert "Hello" in text and "you" in text and "{'" not in text


def test_template_arguments_of_other_rows_are_not_passed_as_none() -> None:
    tokenizer = tokenizer_with("{% if mute is not defined %}{{ messages[-1]['content'] }}{% endif %}{{ shout }}")
    pair = {"chosen": [assistant("a")], "rejected": [assistant("b")]}
    rows = [pair | {"chat_template_kwargs": words} for words in ({"shout": "A"}, {"mute": True, "shout": "B"})]
    assert [tokenizer.decode(ids) for ids in prepare(rows, tokenizer)["chosen_ids"]] == ["aA", "B"]
