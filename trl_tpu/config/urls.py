"""Folders that are URLs, and the folders of this machine that stand for them."""

import tempfile
from pathlib import Path

_PRIVATE: list[tempfile.TemporaryDirectory[str]] = []


def is_url(folder: str) -> bool:
    """Return whether ``folder`` is a URL rather than a folder of this machine."""
    return "://" in folder


def private_folder(url: str) -> str:
    """Make a folder below TMPDIR through which files of ``url`` pass: nobody else's, and removed with this process."""
    _PRIVATE.append(tempfile.TemporaryDirectory(prefix="trl-tpu-", ignore_cleanup_errors=True))
    place, name = _PRIVATE[-1].name, url.rstrip("/").rpartition("/")[2]
    folder = Path(place) if name in ("", ".", "..") else Path(place, name)
    folder.mkdir(exist_ok=True)
    return str(folder)
