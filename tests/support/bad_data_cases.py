"""Data that must be refused, and the words that each error must hold."""

import math

from bad_input import PAIR, Case, both, empty_folder, file, flags, lines, rows

DATA = {
    "no such file": Case(
        flags(dataset_name="{folder}/no.jsonl"), ["Unable to find 'DIR/no.jsonl'", "Correct the name"]
    ),
    "an empty folder of data": Case(
        empty_folder("dataset_name"),
        ["DIR/empty cannot be loaded as a dataset", "doesn't contain any data files", ".jsonl"],
    ),
    "a file of another kind": Case(
        file("d.xyz", b"a"), ["DIR/d.xyz cannot be loaded as a dataset", "what its suffix says (.jsonl"]
    ),
    "a broken line": Case(
        lines('{"chosen": "a", "rej'), ["DIR/pairs.jsonl is broken: line 3: ", "column 17", "Correct"]
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
    "a file that is not compressed": Case(file("d.jsonl.gz", b"{}"), ["DIR/d.jsonl.gz cannot be read (Not a gzipped"]),
    "no Parquet": Case(
        file("d.parquet", b"no"), ["DIR/d.parquet cannot be loaded", "Parquet", "what its suffix says"]
    ),
    "CSV with an empty field": Case(file("d.csv", b"chosen,rejected\na,\n"), ["Row 0", "`rejected` is null", "fill"]),
    "rows of other columns": Case(rows(PAIR, {"text": "b"}), ["Row 1", "`chosen` is null", "Remove such rows"]),
    "no answer": Case(rows(PAIR, {**PAIR, "chosen": None}), ["Row 1", "`chosen` is null", "Remove such rows or"]),
    "a margin of NaN": Case(rows({**PAIR, "margin": math.nan}), ["Row 0", "`margin` is nan", "fill it with 0"]),
}
