"""A report as one page of HTML that needs nothing else: no network, no script, its pictures inside it.

Whatever comes from data, names of groups and texts of pairs, is escaped and cut short: it may be anybody's.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ..evaluation.best_of_n import BestOfN
from ..evaluation.verdict import Verdict
from .canvas import Picture
from .findings import findings
from .scored_rows import ScoredRows, text_of
from .tables import Table, tables_of

_MOST_LETTERS = 700  # of a text of the data
#: By which a page of ours is known.
GENERATOR = '<meta name="generator" content="trl-tpu report">'

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{generator}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c1c1c; --soft: #5f5f5f; --line: #d8d8d8; --ground: #fff; --panel: #f6f6f4}}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e6e6; --soft: #a3a3a3; --line: #3d3d3d; --ground: #141414; --panel: #1e1e1e }}
}}
body {{ margin: 0 auto; max-width: 46rem; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; }}
h2 {{ font-size: 1.2rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--line); }}
h3 {{ font-size: 1rem; margin: 1.4rem 0 .3rem; }}
p, figcaption, .note {{ margin: .4rem 0; }}
figcaption, .note {{ color: var(--soft); font-size: .9rem; }}
figure {{ margin: 0; }}
img {{ display: block; width: 100%; max-width: 38rem; height: auto; }}
ul {{ padding-left: 1.2rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }}
th, td {{ padding: .25rem .7rem .25rem 0; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); white-space: nowrap; }}
th {{ color: var(--soft); font-weight: 600; }}
.words {{ text-align: left; white-space: normal; min-width: 7rem; }}
@media (max-width: 30rem) {{
  table {{ font-size: .8rem }}
  th, td {{ padding-right: .5rem }}
  .words {{ min-width: 5rem }}
}}
details {{ border: 1px solid var(--line); border-radius: .4rem; padding: .3rem .7rem; margin: .5rem 0;
  background: var(--panel); }}
summary {{ cursor: pointer; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; margin: .2rem 0 .8rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


@dataclass(frozen=True)
class Judged:
    """A verdict to report: of a file of scored rows, or of a run's evaluation, whose rows are not known."""

    name: str
    verdict: Verdict | BestOfN
    rows: ScoredRows | None = None


@dataclass(frozen=True)
class Report:
    """What a page shows, in its order.

    Attributes:
        facts: A table that compares what there is.
        speed: A table of what training took; None without runs.
        notes: What could not be shown, and why, a sentence each.
    """

    title: str
    facts: Table
    judged: Sequence[Judged] = ()
    of_verdicts: Sequence[Picture] = ()
    of_training: Sequence[Picture] = ()
    speed: Table | None = None
    notes: Sequence[str] = field(default=())

    @property
    def pictures(self) -> list[Picture]:
        """All pictures, in the page's order."""
        return [*self.of_verdicts, *self.of_training]


def page_of(report: Report) -> str:
    """Return the page."""
    parts = [_table(report.facts, titled=False)]
    for each in report.judged:
        parts += [f"<h2>{_text(each.name)}</h2>", *_verdict(each)]
    if report.of_verdicts:
        parts += ["<h2>Pictures of the verdict</h2>", *map(_figure, report.of_verdicts)]
    if report.speed is not None:
        parts += ["<h2>Training</h2>", _table(report.speed, titled=False), *map(_figure, report.of_training)]
    for each in report.judged:
        parts += _worst(each)
    if report.notes:
        parts.append(f'<h2>Not shown</h2><ul class="note">{_items(report.notes)}</ul>')
    return _PAGE.format(title=_text(report.title), generator=GENERATOR, body="\n".join(parts))


def _verdict(judged: Judged) -> list[str]:
    said = findings(judged.verdict)
    tables = [_table(table) for table in tables_of(judged.verdict)]
    return [f"<ul>{_items(said)}</ul>", *tables]


def _figure(picture: Picture) -> str:
    svg = base64.b64encode(picture.render("svg")).decode()
    title, words = _text(picture.title), _text(picture.words)
    image = f'<img alt="{title}. {words}" src="data:image/svg+xml;base64,{svg}">'
    return f"<h3>{title}</h3><figure>{image}<figcaption>{words}</figcaption></figure>"


def _table(table: Table, titled: bool = True) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="words"' if table.is_words(index) else "" for index in range(len(cells))]
        return "".join(f"<{tag}{kind}>{_text(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    rows = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    title = f"<h3>{_text(table.title)}</h3>" if titled else ""
    return f'{title}<div class="wide"><table><tr>{row(table.header, "th")}</tr>{rows}</table></div>'


def _worst(judged: Judged) -> list[str]:
    """Show the rows that went most wrong, folded, with their texts and rewards."""
    scored, indices = judged.rows, judged.verdict.worst
    if scored is None or not indices:
        return []
    shown = [f"<h2>What {_text(judged.name)} gets most wrong</h2>"]
    for index in indices:
        chosen, rejected = scored.rewards[index]
        row = scored.rows[index]
        title = f"row {index}: rejected {max(rejected):.3f}, chosen {max(chosen):.3f}"
        texts = [("prompt", row["prompt"])] if row.get("prompt") is not None else []
        for column in ("chosen", "rejected"):
            texts += _answers(column, row.get(column), isinstance(row.get(f"reward_{column}"), list))
        body = "".join(f"<strong>{_text(name)}</strong><pre>{_excerpt(text)}</pre>" for name, text in texts)
        shown.append(f"<details><summary>{_text(title)}</summary>{body or 'The file has no texts.'}</details>")
    return shown


def _answers(column: str, given: Any, several: bool) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if not several or not isinstance(given, list):
        return [(column, given)]
    return [(f"{column} {number}", each) for number, each in enumerate(given, start=1)]


def _excerpt(dialogue: Any) -> str:
    """Return the beginning and the end of a text of the data, escaped: pairs often differ at the end."""
    text = text_of(dialogue)
    if len(text) > _MOST_LETTERS:
        half = _MOST_LETTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
    return _text(text)


def _items(sentences: Iterable[str]) -> str:
    return "".join(f"<li>{_text(each)}</li>" for each in sentences)


def _text(text: str) -> str:
    """Escape a text, without control characters and those that turn the direction of others."""
    return escape("".join(letter if letter.isprintable() or letter == "\n" else " " for letter in str(text)))
