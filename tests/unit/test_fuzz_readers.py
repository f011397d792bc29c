"""Any bytes for a config file or a data file: they are read as they are meant, or refused by one clear error."""

import json
from pathlib import Path
from typing import Any

import datasets
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trl_tpu.errors import UserError
from trl_tpu.scripts import datafiles
from trl_tpu.scripts.config_file import read_config

# `tmp_path` is one folder for all examples of a test: each writes its file anew
FAST = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
SLOW = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])  # writes more

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
YAML_PIECES = st.sampled_from(
    [*"[]{}:,-?&*!|>'\"%@`#\t\n ", "a", "env", ": ", "- ", "<<", "---", "...", "!!", "1e3", "é"]
)
ROWS = st.fixed_dictionaries(
    {"chosen": st.text(max_size=6), "rejected": st.text(max_size=6)}, optional={"margin": st.floats(-1, 1)}
)


# ---- YAML


def is_meant_by(value: Any, ours: Any) -> bool:
    """Whether what we read is what PyYAML reads, or the text of it; or a number that only YAML 1.2 knows."""
    if isinstance(value, dict | list):
        parts, own = (list(each.values()) if isinstance(each, dict) else each for each in (value, ours))
        return len(parts) == len(own) and all(map(is_meant_by, parts, own))
    if isinstance(value, str) and isinstance(ours, float):
        return float(value) == ours
    return repr(value) == repr(ours) or (isinstance(ours, str) and repr(yaml.safe_load(ours)) == repr(value))


@FAST
@given(content=st.text() | st.lists(YAML_PIECES).map("".join) | st.binary())
@example(content="a: 2001-13-45")
@example(content="a: .\n<<: 3")
@example(content="? {a: 1}\n: 2")
@example(content="a: !!int x")
@example(content="a: 010\nb: [010, 12:30, 1e-5, on, 2001-01-01]\nc: no\nd: 1_0")
@example(content="a: &a 5\nb: {c: *a}")
def test_any_yaml_is_a_mapping_of_names_or_one_error(content: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    path.write_bytes(data)
    try:
        values = read_config(str(path))
    except UserError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert all(isinstance(name, str) for name in values)
        try:
            expected = yaml.safe_load(data.decode("utf-8-sig"))
        except (yaml.YAMLError, ValueError):
            return  # a date that is none, say, which is text here
        assert is_meant_by(expected, values)


# ---- JSON lines


def one_byte_changed(data: st.DataObject, content: bytes) -> bytes:
    place = data.draw(st.integers(0, len(content) - 1))
    how = data.draw(st.sampled_from(["cut", "drop", "change", "insert"]))
    byte = data.draw(st.binary(min_size=1, max_size=2))
    rest = {
        "cut": b"",
        "drop": content[place + 1 :],
        "change": byte + content[place + 1 :],
        "insert": byte + content[place:],
    }
    return content[:place] + rest[how]


@SLOW
@given(rows=st.lists(ROWS, min_size=1, max_size=5), data=st.data())
def test_a_changed_file_is_rows_or_one_error_that_names_it(
    rows: list[dict], data: st.DataObject, tmp_path: Path
) -> None:
    datasets.disable_progress_bars()
    path = tmp_path / "d.jsonl"
    content = "\n".join(json.dumps(row) for row in rows).encode()
    path.write_bytes(one_byte_changed(data, content) if data.draw(st.booleans()) else content)
    try:
        read = list(datafiles.load(str(path), split="train"))
    except UserError as error:
        assert str(path) in str(error) and "\n" not in str(error), error
        assert path.read_bytes() != content  # good rows are read
    else:
        assert all(isinstance(row, dict) for row in read)
        if path.read_bytes() == content:
            assert [row["chosen"] for row in read] == [row["chosen"] for row in rows]
