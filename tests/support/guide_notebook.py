"""Execute the example notebook, and remove noise from its outputs.

``python tests/support/guide_notebook.py`` executes the notebook in plain torch and stores its outputs.
"""

import os
import re
import tempfile
from pathlib import Path
from unittest import mock

import nbformat
from environment import EXAMPLES, ROOT
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOK = EXAMPLES / "first_reward_model.ipynb"
_PROGRESS = re.compile(r"\s*<div>\s*<progress.*?</div>\s*", re.DOTALL)


def read() -> NotebookNode:
    """Return the notebook with its stored outputs."""
    return nbformat.read(NOTEBOOK, as_version=4)


def execute(folder: Path, timeout: float) -> NotebookNode:
    """Return the notebook with new outputs.

    Args:
        folder: An empty folder. The notebook runs in its subfolder `work`, and Jupyter's own files are in `jupyter`.
        timeout: Maximum number of seconds per cell.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised an error.
    """
    notebook, work, jupyter = read(), folder / "work", folder / "jupyter"
    work.mkdir()
    jupyter.mkdir()
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "USE_TORCH_XLA": "0", "OMP_NUM_THREADS": "1"}
    environment |= {"IPYTHONDIR": str(jupyter / "ipython"), "JUPYTER_RUNTIME_DIR": str(jupyter / "runtime")}
    client = NotebookClient(
        notebook, timeout=timeout, record_timing=False, resources={"metadata": {"path": str(work)}}
    )
    with mock.patch.dict(os.environ, environment):
        client.execute()
    return notebook


def clean(notebook: NotebookNode) -> None:
    """Remove progress bars, warnings and the version of Python: they differ between machines."""
    notebook.metadata.language_info = {"name": "python"}
    for cell in code_cells(notebook):
        outputs: list[NotebookNode] = []
        for output in cell.outputs:
            if output.output_type == "stream":
                if output.name == "stderr":
                    continue
                if outputs and outputs[-1].output_type == "stream":  # stderr was between the two
                    outputs[-1].text += output.text
                    continue
            elif "text/html" in output.get("data", {}):
                output.data["text/html"] = _PROGRESS.sub("", output.data["text/html"])
                if not output.data["text/html"]:
                    continue
            outputs.append(output)
        cell.outputs = outputs


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def main() -> None:
    """Store new outputs in the notebook."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = execute(Path(folder), timeout=300)
    clean(notebook)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
