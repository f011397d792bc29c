"""The verdict beside a model: ``verdict.json``, its pictures, and its section of the model card."""

import re
from collections.abc import Mapping
from pathlib import Path

from ..evaluation.verdict import Verdict
from .pictures import pictures_of
from .sentences import sentences_of
from .tables import as_markdown, markdown_text, tables_of
from .verdict_file import verdict_name, write_verdict


def write_verdicts(verdicts: Mapping[str, Verdict], folder: Path, draws: bool) -> str:
    """Write the verdicts of evaluations into a model's folder, and return the section of its card.

    Args:
        verdicts: By the prefix of their metrics: ``eval``, or ``eval_NAME`` for each of several datasets.
        folder: The model's.
        draws: Whether to draw pictures, too, which takes some tenths of a second.
    """
    named = {
        prefix.removeprefix("eval").removeprefix("_"): verdict
        for prefix, verdict in verdicts.items()
        if re.match("eval(_|$)", prefix)
    }
    if not named:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    parts = ["## Evaluation"]
    for name, verdict in named.items():
        write_verdict(verdict, folder / verdict_name(name))
        parts += [f"### {markdown_text(name)}"] if name else []
        parts.append("\n".join(f"- {markdown_text(sentence)}" for sentence in sentences_of(verdict)))
    titled = {name or "value": verdict for name, verdict in named.items()}
    parts.append(as_markdown(tables_of(titled), markdown_text))
    for picture in pictures_of(titled) if draws else []:
        (folder / f"verdict_{picture.name}.png").write_bytes(picture.png)
        parts.append(f"![{picture.title}](verdict_{picture.name}.png)")
    return "\n\n".join(parts)
