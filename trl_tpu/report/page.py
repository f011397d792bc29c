"""A report as one page of HTML that needs nothing else: no network, no script, its pictures inside it.

Whatever comes from data, names of groups and texts of pairs, is escaped and cut short: it may be anybody's.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from jinja2 import Environment

from ..errors import UserError
from ..evaluation.best_of_n import BestOfN
from ..evaluation.verdict import Verdict
from .pictures import pictures_of, why_none
from .run_history import RunHistory
from .scored_rows import ScoredRows, text_of
from .sentences import sentences_of
from .tables import tables_of
from .verdict_file import VERDICT_FILE, verdict_text

PAGE = "index.html"
_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_GENERATOR = "trl-tpu report"
_MOST_LETTERS = 700  # of a text of the data


def verdicts_of(runs: Sequence[RunHistory], scored: Mapping[str, ScoredRows]) -> dict[str, Verdict | BestOfN]:
    """Return the verdicts of runs' evaluations and on scored files, by name."""
    of_runs = {name: verdict for run in runs for name, verdict in run.verdicts.items()}
    return of_runs | {name: each.verdict for name, each in scored.items()}


def write_page(runs: Sequence[RunHistory], scored: Mapping[str, ScoredRows], folder: Path) -> Path:
    """Write the page, its pictures as PNG files beside it, and each verdict as JSON; return the page's path.

    Args:
        scored: Files of rows with rewards, by name.

    Raises:
        UserError: The folder has a file of such a name that no report wrote.
    """
    page = folder / PAGE
    earlier = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else None
    if earlier is not None and _GENERATOR not in earlier:
        raise UserError(f"{page} is no report, so it stays. Name another folder: --output.")
    verdicts = verdicts_of(runs, scored)
    pictures = pictures_of(verdicts, runs)
    files = {f"{picture.name}.png": picture.png for picture in pictures}
    for number, verdict in enumerate(verdicts.values(), start=1):
        name = VERDICT_FILE if len(verdicts) == 1 else f"verdict-{number}.json"
        files[name] = verdict_text(verdict).encode()
    for path in map(folder.joinpath, files):
        if path.exists() and _entry(path.name, path.read_bytes()) not in (earlier or ""):
            raise UserError(f"{path} was not written by a report, so it stays. Name another folder: --output.")
    environment = Environment(autoescape=True)
    environment.filters |= {"sentences": sentences_of, "base64": _base64, "excerpt": _excerpt}
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        generator=_GENERATOR,
        files=" ".join(_entry(name, content) for name, content in files.items()),
        verdicts=verdicts,
        tables=tables_of(verdicts),
        pictures=pictures,
        why_no_pictures=why_none(),
        runs=runs,
        scored=scored,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    page.write_text(text, encoding="utf-8", errors="replace")
    return page


def _entry(name: str, content: bytes) -> str:
    """Return what a page says of a file next to it, by which a later report knows the file as a report's."""
    return f"{name}={crc32(content):08x}"


def _base64(content: bytes) -> str:
    return b64encode(content).decode()


def _excerpt(dialogue: Any) -> str:
    """Return the beginning and the end of a text of the data: pairs often differ at the end."""
    text = text_of(dialogue)
    if len(text) <= _MOST_LETTERS:
        return text
    half = _MOST_LETTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
