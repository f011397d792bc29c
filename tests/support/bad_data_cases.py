"""Data that must be refused, and the words that each error must hold."""

import gzip
import json

from bad_input import PAIR, Case, answers, both, empty_folder, file, flags, lines, messages, rows

NOT_A_NUMBER = {**PAIR, "margin": "big"}

DATA = {
    "no such file": Case(flags(dataset_name="{folder}/no.jsonl"), ["There is no data file DIR/no.jsonl"]),
    "no such folder": Case(
        flags(dataset_name="{folder}/data"),
        ["DIR/data cannot be loaded as a dataset", "Couldn't find any data file", "Correct the name"],
    ),
    "an empty folder of data": Case(
        empty_folder("dataset_name"),
        ["DIR/empty cannot be loaded as a dataset", "doesn't contain any data files", ".jsonl"],
    ),
    "a file of another kind": Case(
        file("d.xyz", b"a"), ["DIR/d.xyz cannot be loaded as a dataset", "what its suffix says (.jsonl"]
    ),
    "an empty file": Case(file("d.jsonl", b""), ["DIR/d.jsonl is broken: it holds no rows", "Correct"]),
    "a file of empty lines": Case(file("d.jsonl", b"\n\n"), ["DIR/d.jsonl is broken: it holds no rows"]),
    "a broken line": Case(
        lines('{"chosen": "a", "rej'), ["DIR/pairs.jsonl is broken: line 3: ", "(column 17)", "Correct"]
    ),
    "a broken line in the middle": Case(
        lines('{"chosen" "a"}', json.dumps(PAIR)), ["line 3: Expecting ':'", "column"]
    ),
    "a broken line of a stream": Case(
        both(lines("{"), flags(dataset_streaming="true")), ["DIR/pairs.jsonl is broken: line 3: ", "Correct"]
    ),
    "a broken line of a folder": Case(
        both(file("data/train.jsonl", b"{}\n{"), flags(dataset_name="{folder}/data")), ["data/train.jsonl", "line 2"]
    ),
    "a byte that is no UTF-8": Case(
        lines(b'{"chosen": "\xff"}'),
        ["DIR/pairs.jsonl is broken: line 3: 'utf-8' codec can't decode byte 0xff", "Correct"],
    ),
    "a byte that is no UTF-8 in a stream": Case(
        both(lines(b'{"chosen": "\xff"}'), flags(dataset_streaming="true")),
        ["line 3: 'utf-8' codec can't decode byte 0xff", "Correct"],
    ),
    "UTF-16": Case(
        file("d.jsonl", json.dumps(PAIR).encode("utf-16")),
        ["DIR/d.jsonl is broken: line 1: 'utf-8' codec can't decode byte 0xff"],
    ),
    "half a character": Case(
        lines('{"chosen": "\\ud800"}'), ["DIR/pairs.jsonl cannot be loaded", "surrogate pair in string is invalid"]
    ),
    "a control character": Case(lines('{"chosen": "a\0"}'), ["line 3: Invalid control character"]),
    "a name twice": Case(
        lines('{"chosen": "a", "chosen": "b"}'),
        ["DIR/pairs.jsonl cannot be loaded", "Column(/chosen) was specified twice in row 2"],
    ),
    "a row that is a list": Case(
        lines('["a", "b"]'), ["DIR/pairs.jsonl is broken: line 3: a row must be a JSON object"]
    ),
    "a row that is a number": Case(lines("3"), ["line 3: a row must be a JSON object"]),
    "a broken array": Case(file("d.json", b'[{"chosen": "a"},\n{"chosen" "a"}]'), ["DIR/d.json is broken: line 2"]),
    "a file that is not compressed": Case(
        file("d.jsonl.gz", b"{}"), ["DIR/d.jsonl.gz is broken: it cannot be read (Not a gzipped"]
    ),
    "a compressed file that is torn": Case(
        file("d.jsonl.gz", gzip.compress(json.dumps(PAIR).encode() * 99, mtime=0)[:60]),
        ["DIR/d.jsonl.gz", "before the end"],
    ),
    "no Parquet": Case(
        file("d.parquet", b"no"), ["DIR/d.parquet cannot be loaded", "Parquet", "what its suffix says"]
    ),
    "CSV with more fields": Case(
        file("d.csv", b"chosen,rejected\na,b\nc,d,e,f\n"),
        ["DIR/d.csv", "Expected 2 fields in line 3, saw 4", "Correct"],
    ),
    "CSV with an empty field": Case(
        file("d.csv", b"chosen,rejected\na,\n"), ["Row 0", "no `rejected` (null)", "fill"]
    ),
    "no column chosen": Case(rows({"choosen": "a", "rejected": "b"}), ["lacks `chosen`", "rename_column('choosen'"]),
    "none of the columns": Case(rows({"text": "a"}), ["lacks `chosen` and `rejected`", "['text']", "has the columns"]),
    "rows of other columns": Case(rows(PAIR, {"text": "b"}), ["Row 1", "has no `prompt` (null)", "Remove such rows"]),
    "no answer": Case(rows(PAIR, {**PAIR, "chosen": None}), ["Row 1", "no `chosen` (null)", "Remove such rows or"]),
    "an empty answer": Case(rows({"chosen": "", "rejected": "b"}), ["Row 0", "`chosen` is empty", "Remove such rows"]),
    "a number for an answer": Case(rows(PAIR, {**PAIR, "chosen": 3}), ["Row 1", "`chosen` must be text", "got int"]),
    "a prompt of text before messages": Case(
        answers(prompt="Hi"), ["Row 1", "mixes text and lists of messages", "remove_columns('prompt')"]
    ),
    "answers of unequal roles": Case(
        answers(rejected=messages("user")),
        ["Row 1", "`chosen` ends", "'assistant'", "`rejected`", "'user'", "Correct"],
    ),
    "a misspelled role": Case(answers(chosen=messages("asistant")), ["Row 1", "'asistant'", "'assistant'", "roles"]),
    "a role of a number": Case(answers(chosen=messages(3)), ["Row 1", "`chosen` holds {'", "'role': 3", "both text"]),
    "a role of no letters": Case(
        answers(chosen=messages("")), ["Row 1", "`chosen` holds {'", "'role': ''", "both text"]
    ),
    "no role": Case(answers(chosen=[{"content": "a"}]), ["Row 1", "`chosen` holds {'", "A message is {'role': ...,"]),
    "no content": Case(
        answers(chosen=messages(content=None)),
        ["Row 1", "`chosen` holds {'", "'content': None", "'' where nothing was said"],
    ),
    "a number for content": Case(
        answers(chosen=messages(content=3)), ["Row 1", "`chosen` holds {'", "'content': 3", "both text"]
    ),
    "a picture": Case(answers(chosen=messages(content=[{"type": "image"}])), ["Row 1", "type 'image'", "text only"]),
    "tools that are no JSON": Case(
        answers(tools="no json"), ["Row 1", "`tools` must be a list of JSON schemas", "got 'no json'"]
    ),
    "tools that are a number": Case(
        answers(tools="3"), ["Row 1", "`tools` must be a list of JSON schemas", "got '3'"]
    ),
    "one tool": Case(answers(tools={"name": "f"}), ["Row 1", "must be a list", "A single tool is a list of one"]),
    "template arguments of text": Case(
        answers(chat_template_kwargs="x"), ["Row 1", "`chat_template_kwargs` must be an object or null, got 'x'"]
    ),
    "margins of text": Case(rows({**PAIR, "margin": 1.0}, NOT_A_NUMBER), ["Row 0", "'1.0' (str)", "One text among"]),
    "a margin of null": Case(
        rows({**PAIR, "margin": 1}, {**PAIR, "margin": None}), ["Row 1", "no `margin`", "fill it"]
    ),
    "a margin of NaN": Case(lines('{"chosen": "a", "margin": NaN}'), ["has no `margin` (null)", "fill it with 0"]),
    "a margin of a list": Case(
        rows({**PAIR, "margin": [1.0]}), ["Row 0", "`margin` is [1.0] (list)", "finite number"]
    ),
    "a margin of true": Case(rows({**PAIR, "margin": True}), ["Row 0", "`margin` is True (bool)", "finite number"]),
    "a margin beyond float32": Case(rows({**PAIR, "margin": 1e300}), ["Row 0", "`margin` is 1e+300", "finite number"]),
    "a token that the model lacks": Case(
        rows({"chosen_ids": [5], "rejected_ids": [999]}),
        ["Row 0", "token id 999", "272 rows", "model's own tokenizer"],
    ),
}
