"""Runs whose files are kept at a URL: on any file system of fsspec, such as `gs://bucket/run`.

Object stores have no rename. There a checkpoint is complete when its manifest is there, which is uploaded last, and
invisible before. Files pass through a folder on the host's own disk.
"""

import hashlib
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import fsspec

from .manifest import MANIFEST_FILE

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def is_url(folder: str) -> bool:
    """Whether ``folder`` is a URL rather than a folder of this machine."""
    return "://" in folder


def staging_folder(url: str) -> str:
    """The folder of this machine through which files of ``url`` pass; below TMPDIR, the same for each run."""
    return str(Path(tempfile.gettempdir(), "trl-tpu", hashlib.sha256(url.encode()).hexdigest()[:16]))


class RemoteRun:
    """The files of a run at a URL.

    Raises:
        ImportError, ValueError: fsspec knows no such protocol, or needs a package for it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files, self._root = fsspec.core.url_to_fs(self.url)

    def checkpoints(self) -> list[str]:
        """The names of complete checkpoints, of the last step first."""
        manifests = self._files.glob(f"{self._root}/checkpoint-*/{MANIFEST_FILE}")
        names = [path.rsplit("/", 2)[-2] for path in manifests]
        steps = {name: int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))}
        return sorted(steps, key=steps.__getitem__, reverse=True)

    def put(self, folder: Path, names: Iterable[str], below: str = "") -> None:
        """Upload files of ``folder``, in this order, to ``below`` the URL."""
        for name in names:
            target = "/".join(filter(None, (self._root, below, name)))
            self._files.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            self._files.put_file(str(folder / name), target)

    def get(self, name: str, folder: Path) -> Path:
        """Download the checkpoint ``name`` to below ``folder``."""
        (target := folder / name).mkdir(parents=True, exist_ok=True)
        beginning = f"{self._root}/{name}/"
        for path in self._files.find(beginning):
            own = target / path.rsplit(f"/{name}/", 1)[1]
            own.parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(path, str(own))
        return target

    def delete(self, name: str) -> None:
        """Remove a checkpoint, its manifest first: half removed, it is no checkpoint."""
        folder = f"{self._root}/{name}"
        if self._files.exists(f"{folder}/{MANIFEST_FILE}"):
            self._files.rm(f"{folder}/{MANIFEST_FILE}")
        if self._files.exists(folder):
            self._files.rm(folder, recursive=True)

    def rotate(self, limit: int | None, best: str | None) -> None:
        """Keep the newest ``limit`` checkpoints, among them ``best``."""
        if not limit or limit < 0:
            return
        names = self.checkpoints()
        kept = names[:limit]
        if best in names and best not in kept:
            kept = [best, *names[: limit - 1]] if limit > 1 else [best, names[0]]  # never the last one saved
        for name in set(names) - set(kept):
            self.delete(name)
