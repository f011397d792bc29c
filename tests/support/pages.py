"""README and the guides as tests read them: their blocks, commands and the messages that they quote."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from places import EXAMPLES, ROOT

PAGES = [ROOT / "README.md", *sorted((EXAMPLES / "guides").glob("*.md")), EXAMPLES / "recipes" / "README.md"]
NOT_RUN = "# not run by the tests: "

_BLOCK = re.compile(r"^```(\w+)( no-run)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        language: The first word of its fence.
        runs: Whether it is to run here; the others have ``no-run`` in the fence, and say why in their first line.
        line: Where in the page its text begins.
    """

    language: str
    runs: bool
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2] is None, match[3], text.count("\n", 0, match.start(3)) + 1)
        for match in _BLOCK.finditer(text)
    ]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def commands(block: Block) -> Iterator[list[str]]:
    """The words after each ``trl-tpu`` of a block of shell or YAML, also where a command is quoted within another."""
    if block.language == "yaml":
        yield from _listed(yaml.safe_load(block.text))
        return
    for line in block.text.replace("\\\n", " ").splitlines():
        yield from _typed(line)


def _typed(line: str) -> Iterator[list[str]]:
    words = shlex.split(line, comments=True)
    for word in words:
        if "trl-tpu " in word:
            yield from _typed(word.partition("=")[2] if word.startswith("--") else word)
    if "trl-tpu" in words:
        yield words[words.index("trl-tpu") + 1 :]


def _listed(value: Any) -> Iterator[list[str]]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        if value[:1] == ["trl-tpu"]:
            yield value[1:]
        for part in value:
            yield from _listed(part)


def said_in(package: Path) -> list[str]:
    """Every text in the source of a package, with "..." where a value goes."""
    texts = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[sd]|%\.\d+f", "...", node.value))
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(_part(part) for part in node.values))
    return texts


def _part(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "..."


def quoted(text: str) -> list[str]:
    """The code spans of a line, of one backtick or of two."""
    return [(two or one).strip() for two, one in re.findall(r"``(.+?)``|`([^`]+)`", text)]
