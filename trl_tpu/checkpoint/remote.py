"""Runs whose files are kept at a URL: on any file system of fsspec, such as `gs://bucket/run`.

Object stores have no rename. There a checkpoint is complete when its manifest is there, which is uploaded last, and
invisible before. Files pass through a folder on the host's own disk.
"""

import glob
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec

from ..config.urls import is_url
from ..errors import UserError
from .manifest import MANIFEST_FILE, newest_first, path_below


@contextmanager
def local_copy(folder: str | Path) -> Iterator[Path]:
    """Give a folder of this machine as it is, and of one at a URL a copy below TMPDIR, removed on leaving.

    Raises:
        UserError: There is nothing at the URL.
    """
    if not is_url(str(folder)):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="trl-tpu-") as place:
        name = str(folder).rstrip("/").rpartition("/")[2]
        yield RemoteRun(str(folder)).get(path_below(place, name) or Path(place))


@contextmanager
def refusing(fault: str, advice: str) -> Iterator[None]:
    """Refuse, as the user's to mend, what a file system cannot do: fsspec's say it in errors of many kinds.

    Raises:
        UserError: With the fault, the error, and the advice.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UserError(f"{fault}: {reason}. {advice}") from error


_CORRECT = "Correct the URL, or what is there."


class RemoteRun:
    """The files of a run at a URL.

    Raises:
        UserError: fsspec knows no such protocol, needs a package for it, or finds no archive where the URL says one.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with refusing(f"{url} cannot be opened", _CORRECT):
            self._files, self._root = fsspec.core.url_to_fs(self.url)

    def checkpoints(self) -> list[str]:
        """Return the names of complete checkpoints, the last step first.

        Raises:
            UserError: The URL cannot be listed.
        """
        with refusing(f"{self.url} cannot be listed", _CORRECT):
            manifests = self._files.glob(f"{glob.escape(self._root)}/checkpoint-*/{MANIFEST_FILE}")
        return newest_first(path.rsplit("/", 2)[-2] for path in manifests)

    def read_text(self, name: str) -> str | None:
        """Return the text of a file below the URL; None if there is no such file."""
        try:
            return self._files.cat_file(f"{self._root}/{name}").decode(errors="replace")
        except FileNotFoundError:
            return None

    def write_text(self, name: str, text: str) -> None:
        """Write a file below the URL."""
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(f"{self._root}/{name}", text.encode())

    def names(self) -> list[str]:
        """Return the names of files directly below the URL."""
        found = self._files.find(self._root, maxdepth=1) if self._files.exists(self._root) else []
        return [path.rpartition("/")[2] for path in found]

    def delete_files(self, names: Iterable[str]) -> None:
        """Remove files directly below the URL."""
        for name in names:
            self._files.rm_file(f"{self._root}/{name}")

    def move(self, checkpoints: Iterable[str], below: str) -> None:
        """Move checkpoints to ``below``, their manifests first: half moved, a checkpoint is none."""
        for name in checkpoints:
            old, new = f"{self._root}/{name}", f"{self._root}/{below}/{name}"
            paths = sorted(self._files.find(old), key=lambda path: not path.endswith(f"{name}/{MANIFEST_FILE}"))
            for path in paths:
                moved = f"{new}/{path.partition(f'/{name}/')[2]}"
                self._files.makedirs(moved.rpartition("/")[0], exist_ok=True)
                self._files.cp_file(path, moved)
                self._files.rm_file(path)
            self.delete(name)  # folders, where the file system has such

    def put(self, folder: Path, names: Iterable[str], below: str = "") -> None:
        """Upload files of ``folder``, in this order, to ``below`` the URL."""
        for name in names:
            target = "/".join(filter(None, (self._root, below, name)))
            self._files.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            self._files.put_file(str(folder / name), target)

    def get(self, folder: Path) -> Path:
        """Download what is below the URL to below ``folder``, and return that.

        Raises:
            UserError: There is nothing, it cannot be read, or a name there leads elsewhere: an archive or a store may
                have any.
        """
        beginning = f"{self._root}/"
        with refusing(f"{self.url} cannot be copied", _CORRECT):
            found = self._files.find(beginning)
            copies = [path_below(folder, path.removeprefix(beginning)) for path in found]
            if None in copies:
                raise ValueError(f"its file {found[copies.index(None)]!r} would be written outside of the folder")
            if not copies:
                raise FileNotFoundError("there is nothing")
            for path, copy in zip(found, filter(None, copies), strict=True):
                copy.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(path, str(copy))
        return folder

    def delete(self, name: str) -> None:
        """Remove a checkpoint, its manifest first: half removed, it is no checkpoint."""
        folder = f"{self._root}/{name}"
        if self._files.exists(f"{folder}/{MANIFEST_FILE}"):
            self._files.rm_file(f"{folder}/{MANIFEST_FILE}")
        found = self._files.find(folder, withdirs=True, detail=True)
        # one by one: `rm` takes a path for a pattern, and run[1] for the run1 of somebody else
        for path in sorted(found, reverse=True):
            if found[path]["type"] != "directory":
                self._files.rm_file(path)
            else:
                with suppress(OSError):  # object stores have no folders
                    self._files.rmdir(path)
