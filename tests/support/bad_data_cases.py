"""Data that must be rejected, and the words that each error must hold."""

import math

from bad_input import PAIR, Case, both, empty_folder, file, flags, lines, rows

DATA = {
    "no such file": Case(flags(dataset_name="{folder}/no.jsonl"), ["DIR/no.jsonl"]),
    "an empty folder of data": Case(empty_folder("dataset_name"), ["DIR/empty", ".jsonl"]),
    "a file of another kind": Case(file("d.xyz", b"a"), ["DIR/d.xyz", ".jsonl"]),
    "a broken line": Case(lines('{"chosen": "a", "rej'), ["DIR/pairs.jsonl", "line 3: ", "column 17"]),
    "a broken line of a stream": Case(
        both(lines("{"), flags(dataset_streaming="true")), ["DIR/pairs.jsonl", "line 3: "]
    ),
    "a broken line of a folder": Case(
        both(file("data/train.jsonl", b"{}\n{"), flags(dataset_name="{folder}/data")), ["data/train.jsonl", "line 2"]
    ),
    "a byte that is no UTF-8": Case(lines(b'{"chosen": "\xff"}'), ["DIR/pairs.jsonl", "line 3: ", "0xff"]),
    "a file that is not compressed": Case(file("d.jsonl.gz", b"{}"), ["DIR/d.jsonl.gz", "gzip"]),
    "no Parquet": Case(file("d.parquet", b"no"), ["DIR/d.parquet", "Parquet"]),
    "CSV with an empty field": Case(file("d.csv", b"chosen,rejected\na,\n"), ["Row 0", "`rejected` is null"]),
    "no answer": Case(rows(PAIR, {**PAIR, "chosen": None}), ["Row 1", "`chosen` is null"]),
    "a margin of NaN": Case(rows({**PAIR, "margin": math.nan}), ["Row 0", "`margin` is nan"]),
}
