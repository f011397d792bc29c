"""Data traps are logged with their count and first row, and common row formats are converted."""

import copy
import json
import logging
from typing import Any

import pytest
from datasets import Dataset
from preference_rows import TOOLS, assistant, prepare, rows_of_every_format, tiny_tokenizer, user
from tokenizers.processors import TemplateProcessing

from trl_tpu.data.formats import apply_template
from trl_tpu.data.kinds import Pairs
from trl_tpu.errors import UserError
from trl_tpu.modeling.head_spec import HeadSpec
from trl_tpu.scoring.stream import Form, flatten_items
from trl_tpu.scripts.synthetic import load_dataset

GOOD = {"chosen": "good", "rejected": "bad"}
QUESTION, YES, NO = user("q"), assistant("yes"), assistant("no")
CHAT = {"chosen": [QUESTION, YES], "rejected": [QUESTION, NO]}
ANSWERS = {"chosen": [YES], "rejected": [NO]}
RANKED = {"completions": ["a", "b"], "scores": [1.0, 2.0]}
PAIRS = Form(Pairs.scored_columns, best_only=False, spec=HeadSpec())
SINGLE = {"prompt": "p", "completions": ["a"], "scores": [1.0]}


def adding_bos() -> Any:
    tokenizer = tiny_tokenizer(bos_token="<|begin|>")
    special: Any = [("<|begin|>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|begin|> $0", special_tokens=special)
    return tokenizer


WHAT, NO_QUESTIONS = "What is it?", dict.fromkeys(("input", "query", "context"), "")
# text in the message, a row without the trap, and the columns that trigger it
TRAPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "question": ("question, system", {**GOOD, "question": "", "system": None}, {"question": WHAT, "system": "Be"}),
    "repeated question": ("context", {"chosen": "Q? a", "rejected": "Q? b", "context": "Q?"}, {"rejected": "b"}),
    "questions of some rows": ("input, query", {**GOOD, **NO_QUESTIONS}, {"input": WHAT, "query": WHAT}),
    "history": ("history", {**GOOD, "history": []}, {"history": [[WHAT, "What?"]]}),
    "question of rankings": ("query", {**RANKED, "query": ""}, {"query": WHAT}),
    "question of messages": ("input", {**ANSWERS, "input": ""}, {"input": WHAT}),
    "system prompt": ("system_prompt", {"prompt": "p", **GOOD, "system_prompt": ""}, {"system_prompt": "Be"}),
    "history before a prompt": ("history", {"prompt": "Why", **GOOD, "history": []}, {"history": [["Why?", "a"]]}),
    "context of answers": ("context", {"prompt": [user("q")], **ANSWERS, "context": "q"}, {"context": WHAT}),
    "context of conversations": ("context", {**CHAT, "context": "q"}, {"context": WHAT}),
    "system of rankings": ("system", {"prompt": "p", **RANKED, "system": None}, {"system": "Be"}),
    "documents of single answers": ("docu", {**SINGLE, "documents": ["p"]}, {"documents": ["p", WHAT]}),
    "messages": (
        "messages",
        {"prompt": [user("q")], **ANSWERS, "messages": CHAT["rejected"]},
        {"messages": [user("r")]},
    ),
    "messages after an answer": ("messages", {**ANSWERS, "messages": ANSWERS["chosen"]}, {"messages": CHAT["chosen"]}),
    "tools of text": ("tools", {"prompt": "p", **GOOD, "tools": ""}, {"tools": json.dumps(TOOLS)}),
    "prompt twice": ("prompt", {**GOOD, "prompt": f"{WHAT} "}, {"chosen": f"{WHAT} a", "rejected": WHAT}),
    "prompt twice in messages": ("prompt", {**ANSWERS, "prompt": [user("q")]}, CHAT),
    "prompt twice in rankings": ("prompt", {**RANKED, "prompt": WHAT}, {"completions": [f"{WHAT} a", f"{WHAT} b"]}),
    "second BOS": ("<|begin|>", GOOD, {"chosen": "<|begin|>good", "rejected": "<|begin|>bad"}),
    "BOS of a prompt": ("<|begin|>", {"prompt": "p", **GOOD}, {"prompt": "<|begin|>p"}),
    "second EOS": ("<|im_end|>", GOOD, {"rejected": "bad<|im_end|>\n"}),
    "JSON next to text": ("JSON", {"prompt": "p", **GOOD}, {"prompt": json.dumps([user("q")])}),
}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("streaming", [False, True])
def test_data_trap_is_logged_once(trap: str, streaming: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The message has the count and the first row."""
    named, row, others = TRAPS[trap]
    if streaming and "scores" in row:
        pytest.skip("a stream has no rankings")
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        list(prepare([row, row | others, row | others, row], adding_bos(), streaming))
    messages = [each.getMessage() for each in caplog.records if each.name.endswith("data.checks")]
    for message, name in zip(messages, named.split(", "), strict=True):
        assert name in message and "row 1" in message and ("2 of 4" in message or streaming)


IDS = {"id": "7", "question_id": "q7", "source": "web", "language": "en", "chosen_model": "a", "score_chosen": 8.0}
ORDINARY: list[dict[str, Any]] = [
    {"question": "What is it?", "chosen": "What is it? a", "rejected": "What is it? b"},
    {**IDS, **GOOD, "prompt": "Hm", "critique": "Both are short.", "system": " ", "history": [], "tools": ""},
    {**IDS, **CHAT, "messages": CHAT["chosen"]},
    {**GOOD, "prompt": "q", "messages": [user("q"), assistant("bad")], "conversations": None},
    {**GOOD, "prompt": "Say what.\n\nIs it", "instruction": "Say what. ", "input": "Is it"},
    {**GOOD, "prompt": f"Use {json.dumps(TOOLS[0])}:", "tools": json.dumps(TOOLS)},
    {"prompt": [{"role": "system", "content": "s"}, user("q")], **ANSWERS, "system": "s", "context": "q"},
    {"prompt": [user("q")], "chosen": [assistant("<think>\n\n</think>\n\na\tb")], "rejected": [assistant(" b\n")]},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": each} for each in ("Hel", "lo")]}], **ANSWERS},
]


def test_ordinary_rows_trigger_no_trap(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        for name in ("synthetic:numbers", "synthetic:rankings"):
            for split in load_dataset(name).values():
                prepare(split.to_list()[:200], adding_bos())
        for rows in rows_of_every_format().values():
            prepare(rows, adding_bos())
        prepare([{"prompt": "Hello", "chosen": "Hello! How are you?", "rejected": "Hello, you."}])
        for row in ORDINARY:
            prepare([row])
    assert not [each.getMessage() for each in caplog.records if each.name.endswith("data.checks")]


def test_pairs_made_equal_by_the_template_are_named(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "S{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    dropped = {half: [{"role": "Human", "content": "q"}, {"role": "Bot", "content": half}] for half in GOOD}
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        prepare([CHAT, dropped, CHAT], tokenizer)
    assert "1 of 3" in caplog.text and "row 1), chosen and rejected" in caplog.text and "'Bot'" in caplog.text
    list(prepare([CHAT, dropped], tokenizer, streaming=True))
    assert "same tokens" in caplog.records[-1].getMessage()
    with pytest.raises(UserError, match="2 of 3 rows.*row 0"):
        prepare([dropped] * 2 + [CHAT], tokenizer)


# names of parts, and two conversations that differ in this part only
UNWRITTEN: dict[str, list[list[dict[str, Any]]]] = {
    "<think>": [[assistant(f"<think>{thought}</think>yes")] for thought in ("a", "b")],
    "'critic'": [[{"role": "critic", "content": text}, YES] for text in ("is", "or")],
    "`reasoning_content`": [[YES | {"reasoning_content": thought}] for thought in ("yes", "no")],
    "`tool_calls`": [[YES | {"tool_calls": [{"function": {"name": name}}]}] for name in ("yes", "no")],
}


@pytest.mark.parametrize("part", [*UNWRITTEN, "`tools`"])
def test_parts_that_the_template_does_not_write_are_named(part: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, answers = tiny_tokenizer(), UNWRITTEN.get(part, [])
    content = "{{ m.role }}: {{ m.content.split('</think>')[-1] }}"
    tokenizer.chat_template = f"{{% for m in messages if m.role != 'critic' %}}{content}. {{% endfor %}}"
    good: dict[str, Any] = {"prompt": [QUESTION], **ANSWERS, "tools": []}
    bad = good | ({"chosen": answers[0]} if answers else {"tools": TOOLS})
    single = {"prompt": [QUESTION], "completions": [bad["chosen"]], "scores": [1.0], "tools": bad["tools"]}
    ranked = single | {"completions": [[NO], *single["completions"]], "scores": [1.0, 2.0]}
    for rows in ([good, bad, bad, good], [single], [ranked]):
        for streaming in (False,) if "scores" in rows[0] else (False, True):
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="trl_tpu"):
                list(prepare(rows, tokenizer, streaming))
            (message,) = [each.getMessage() for each in caplog.records]
            assert part in message and ("2 of 4" in message or streaming or len(rows) == 1)
            assert "row 1" in message or len(rows) == 1
    if answers:
        with pytest.raises(UserError, match=f"2 of 3 rows.*{part}"):
            prepare([dict(zip(GOOD, answers, strict=True))] * 2 + [good], tokenizer)


def sharegpt_message(role: str, text: str) -> dict[str, str]:
    return {"from": role, "value": text}


def parts(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "value": text}], "loss_weight": 1.0}


TEXTS = {"chosen": "yes", "rejected": "no"}
CONVERTED: dict[str, dict[str, Any]] = {
    "JSON text": {"chosen": json.dumps([QUESTION, YES]), "rejected": json.dumps([QUESTION, NO])},
    "Python text, as in CSV files": {"chosen": str([QUESTION, YES]), "rejected": str([QUESTION, NO])},
    "JSON with a prompt": {"prompt": json.dumps([QUESTION]), "chosen": json.dumps(YES), "rejected": json.dumps([NO])},
    "single messages": {"prompt": [QUESTION], "chosen": YES, "rejected": NO},
    "ShareGPT": {"conversations": [sharegpt_message("human", "q")]}
    | {half: sharegpt_message("gpt", text) for half, text in TEXTS.items()},
    "LLaMA-Factory's messages": {"messages": [QUESTION], "chosen": YES, "rejected": NO},
    "whole ShareGPT conversations": {"conversations": [sharegpt_message("human", "another")]}
    | {half: [sharegpt_message("human", "q"), sharegpt_message("gpt", text)] for half, text in TEXTS.items()},
    "LLaMA-Factory v1": {
        f"{half}_messages": [parts("user", "q"), parts("assistant", text)] for half, text in TEXTS.items()
    },
    "a null prompt": {"prompt": None, **CHAT},
}


@pytest.mark.parametrize("form", CONVERTED)
def test_other_formats_are_trained_and_scored_as_messages(form: str, caplog: pytest.LogCaptureFixture) -> None:
    row, tokenizer = CONVERTED[form], tiny_tokenizer()
    (expected,) = prepare([CHAT])
    for streaming in (False, True):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="trl_tpu"):
            (found,) = prepare([row], streaming=streaming)
        assert [found[key] for key in Pairs.columns] == [expected[key] for key in Pairs.columns]
        is_told = form not in ("a null prompt", "single messages")
        assert [each.name for each in caplog.records] == ["trl_tpu.data.checks"] * is_told
    scored = flatten_items(PAIRS.read(Dataset.from_list([row])[0], "Row 0", tokenizer))
    texts = [item.dialogue and apply_template(tokenizer, item.dialogue) for item in scored]  # type: ignore[arg-type]
    assert texts == [apply_template(tokenizer, CHAT[half]) for half in GOOD]


@pytest.mark.parametrize(
    "turns", [{"conversations": [sharegpt_message("human", "q")]}, {"messages": [QUESTION]}], ids=str
)
def test_sharegpt_system_prompts_and_rankings_are_read(turns: dict[str, Any]) -> None:
    answers = [sharegpt_message("gpt", "yes"), sharegpt_message("gpt", "no")]
    (found,) = prepare([{"system": "s", **turns, "completions": answers, "scores": [1.0, 0.0]}])
    system = {"role": "system", "content": "s"}
    (expected,) = prepare([{half: [system, *CHAT[half]] for half in GOOD}])
    assert found["answer_ids"] == [expected[key] for key in Pairs.columns]


def test_text_that_resembles_messages_stays_text() -> None:
    (found,) = prepare([{"prompt": "p", "chosen": '{"role": "boss"}', "rejected": "[{'a': 1}]"}])
    assert tiny_tokenizer().decode(found["chosen_ids"]) == 'p{"role": "boss"}<|im_end|>'


def test_arrow_nulls_in_tools_and_calls_are_not_rendered() -> None:
    def function(name: str, **values: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, **values}}

    properties = {"f": {"x": {"type": "integer"}}, "g": {"y": {"type": "string", "enum": ["s"]}}, "h": {}}
    tools = [function(name, parameters={"properties": each}) for name, each in properties.items()]
    calls = [function("f", arguments={"x": 1}), function("g", arguments={"y": {"deep": "s"}}), function("h")]
    tool_message = {"role": "tool", "name": "f", "content": "1"}
    rows = [
        {"chosen": [user("q"), assistant("") | {"tool_calls": [call]}, tool_message, YES], "rejected": [user("q"), NO]}
        | {"tools": tools[place:]}
        for place, call in enumerate(calls)
    ]
    original, tokenizer = copy.deepcopy(rows), tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{% if m.name is defined %}{{ m.name }}{% endif %}"
        "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}{{ m.content }}{% endfor %}"
    )
    found = prepare(rows, tokenizer)
    merged = Dataset.from_list(rows)
    for row, came, ids in zip(original, merged, found, strict=True):
        for half in GOOD:
            expected = tokenizer.apply_chat_template(row[half], tools=row["tools"], tokenize=False)
            assert tokenizer.decode(ids[f"{half}_ids"]) == expected
        scored: Any = flatten_items(PAIRS.read(came, "Row 0", tokenizer))[0]
        expected = tokenizer.apply_chat_template(row["chosen"], tools=row["tools"], tokenize=False)
        assert apply_template(tokenizer, scored.dialogue, tools=scored.row["tools"]) == expected
