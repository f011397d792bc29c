"""The example notebook runs, its stored outputs have the form of new ones, and its links exist."""

import re
from pathlib import Path

import guide_notebook
import pytest
from environment import ROOT
from nbformat import NotebookNode

ABSOLUTE_PATH = re.compile(r"(?<![\w.<:/])/[\w.-]+/|\b[A-Z]:\\")


@pytest.fixture(scope="module")
def stored() -> NotebookNode:
    return guide_notebook.read()


def texts(cell: NotebookNode) -> list[str]:
    """Return the text outputs of a code cell, without pictures."""
    return [
        text
        for output in cell.outputs
        for kind, text in (output.get("data") or {"text/plain": output.get("text", "")}).items()
        if not kind.startswith("image/")
    ]


def kinds(cell: NotebookNode) -> list[str]:
    """Return "image" or "text" for each output of a code cell."""
    is_image = [any(kind.startswith("image/") for kind in output.get("data", {})) for output in cell.outputs]
    return ["image" if image else "text" for image in is_image]


def test_notebook_trains_an_accurate_model_with_the_stored_outputs(stored: NotebookNode, tmp_path: Path) -> None:
    executed = guide_notebook.execute(tmp_path, timeout=80)  # raises the error of a cell
    guide_notebook.clean(executed)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["runs"]
    cells = {cell.id: cell for cell in guide_notebook.code_cells(executed)}
    (accuracy,) = re.findall(r"Accuracy on held-out pairs: ([\d.]+)", "\n".join(texts(cells["evaluate"])))
    assert float(accuracy) > 0.9
    pairs = re.findall(r"([-\d.]+) with trl_tpu, ([-\d.]+) with transformers", texts(cells["transformers"])[0])
    assert len(pairs) == 2
    assert all(float(ours) == pytest.approx(float(theirs), abs=2e-4) for ours, theirs in pairs)
    new = {name: kinds(cell) for name, cell in cells.items()}
    assert {cell.id: kinds(cell) for cell in guide_notebook.code_cells(stored)} == new


def test_stored_outputs_are_clean(stored: NotebookNode) -> None:
    cleaned = guide_notebook.read()
    guide_notebook.clean(cleaned)
    assert cleaned == stored
    for cell in guide_notebook.code_cells(stored):
        found = [match for text in (cell.source, *texts(cell)) for match in ABSOLUTE_PATH.findall(text)]
        assert found == [], cell.id


def test_notebook_is_small_and_its_links_exist(stored: NotebookNode) -> None:
    assert guide_notebook.NOTEBOOK.stat().st_size < 400_000
    assert len(guide_notebook.code_cells(stored)) <= 14
    text = "\n".join(cell.source for cell in stored.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#:]+)", text)
    assert len(links) > 5
    assert [link for link in links if not (guide_notebook.NOTEBOOK.parent / link).exists()] == []
    for page in (ROOT / "README.md", guide_notebook.NOTEBOOK.parent / "guides" / "first_reward_model.md"):
        assert f"{guide_notebook.NOTEBOOK.name})" in page.read_text(encoding="utf-8"), page
