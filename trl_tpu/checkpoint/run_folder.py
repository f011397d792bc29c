"""The folder of a run: its lock, its checkpoints, and its mirror at a URL."""

import fcntl
import glob
import json
import logging
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec

from ..config.reward_config import is_url
from ..errors import UserError, explaining
from .manifest import MANIFEST_FILE, STAGING_FOLDER, discard, flush, newest_first, path_below, retire, step_of

logger = logging.getLogger(__name__)


@contextmanager
def local_copy(folder: str | Path) -> Iterator[Path]:
    """Give a folder of this machine as it is; one at a URL as a copy below TMPDIR, removed on leaving.

    Raises:
        UserError: There is nothing at the URL.
    """
    if not is_url(str(folder)):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="trl-tpu-") as place:
        name = str(folder).rstrip("/").rpartition("/")[2]
        yield RemoteRun(str(folder)).get(Path(place) if name in ("", ".", "..") else Path(place, name))


_CORRECT = "Correct the URL, or its content."


class RemoteRun:
    """The files of a run at a URL.

    Raises:
        UserError: fsspec cannot open the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with explaining(f"{url} cannot be opened", _CORRECT):
            self._files, self._root = fsspec.core.url_to_fs(self.url)

    def checkpoints(self) -> list[str]:
        """Return the names of complete checkpoints, the last step first."""
        with explaining(f"{self.url} cannot be listed", _CORRECT):
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
        paths = self._files.find(self._root, maxdepth=1) if self._files.exists(self._root) else []
        return [path.rpartition("/")[2] for path in paths]

    def delete_files(self, names: Iterable[str]) -> None:
        """Remove files directly below the URL."""
        for name in names:
            self._files.rm_file(f"{self._root}/{name}")

    def move(self, checkpoints: Iterable[str], below: str) -> None:
        """Move checkpoints to ``below``: each is copied before it is deleted."""
        for name in checkpoints:
            for path in self._files.find(f"{self._root}/{name}"):
                copy = f"{self._root}/{below}/{path.removeprefix(f'{self._root}/')}"
                self._files.makedirs(copy.rpartition("/")[0], exist_ok=True)
                self._files.cp_file(path, copy)
            self.delete(name)

    def put(self, folder: Path, names: Iterable[str], below: str = "") -> None:
        """Upload files of ``folder``, in this order, to ``below`` the URL."""
        for name in names:
            target = "/".join(filter(None, (self._root, below, name)))
            self._files.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            self._files.put_file(str(folder / name), target)

    def get(self, folder: Path) -> Path:
        """Download all files below the URL to ``folder``, and return it.

        Raises:
            UserError: There are none, one cannot be read, or the name of one leads out of the folder: an archive or a
                store may have any name.
        """
        with explaining(f"{self.url} cannot be copied", _CORRECT):
            root = f"{self._root}/"
            copies = {path: path_below(folder, path.removeprefix(root)) for path in self._files.find(root)}
            if not copies:
                raise FileNotFoundError("there is nothing")
            for path, copy in copies.items():
                copy.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(path, str(copy))
        return folder

    def delete(self, name: str) -> None:
        """Remove a checkpoint, its manifest first: half removed, it is no checkpoint."""
        folder = f"{self._root}/{name}"
        if self._files.exists(f"{folder}/{MANIFEST_FILE}"):
            self._files.rm_file(f"{folder}/{MANIFEST_FILE}")
        entries = self._files.find(folder, withdirs=True, detail=True)
        # one by one: `rm` reads a path as a pattern, so that run[1] would delete files of run1
        for path in sorted(entries, reverse=True):
            if entries[path]["type"] != "directory":
                self._files.rm_file(path)
            else:
                with suppress(OSError):  # object stores have no folders
                    self._files.rmdir(path)


RUN_FILE = "_run.json"
EARLIER_FOLDER = "_earlier"


class RunFolder:
    """Finds, deletes and moves a run's checkpoints, and locks its folder.

    Args:
        path: The folder; for a run at a URL a folder of this machine through which its files pass.
        remote: The run at a URL, if it is kept there.
        writes: Whether this process is the one that writes there.
    """

    def __init__(self, path: Path, remote: RemoteRun | None, writes: bool) -> None:
        self.path, self.remote, self._writes = path, remote, writes
        self._place = str(path) if remote is None else remote.url
        self._run: dict[str, Any] = {}  # the content of `_run.json`
        self._file: int | None = None

    # ---- its checkpoints

    def place_of(self, checkpoint: str) -> str:
        """Return the folder, or URL, of a checkpoint by its name."""
        return f"{self._place}/{checkpoint}"

    def checkpoints(self) -> list[str]:
        """Return the names of checkpoints, the last step first; on this machine also of those that are not whole."""
        if self.remote is not None:
            return self.remote.checkpoints()
        return newest_first(path.name for path in self.path.glob("checkpoint-*") if path.is_dir())

    def rotate(self, limit: int | None, needed: set[str]) -> None:
        """Delete checkpoints, first steps first, until ``limit`` are left; none that is ``needed``."""
        try:
            names = self.checkpoints() if limit is not None and limit > 0 else []
            surplus = len(names) - max(limit or 0, len(needed.intersection(names)))
            for name in [name for name in names[::-1] if name not in needed][: max(surplus, 0)]:
                if self.remote is not None:
                    self.remote.delete(name)
                else:
                    retire(self.path / name)
        except Exception as error:  # file systems of fsspec raise errors of many kinds
            kind = type(error).__name__
            logger.warning("Older checkpoints in %s could not be deleted (%s: %s).", self._place, kind, error)

    # ---- the process that trains

    def claim(self) -> None:
        """Keep other trainers from training in the folder, until `release`.

        Raises:
            UserError: Another trainer does, in this process or another, or the folder cannot be written to.
        """
        with self._explaining():
            if self._writes and self.remote is None:
                self.path.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path / RUN_FILE, os.O_RDWR | os.O_CREAT, 0o644)
                self._lock(self._file)
                for left in (self.path / STAGING_FOLDER).glob("checkpoint-*"):  # by a process that was killed
                    discard(left)
            self._run = self._read()

    def _lock(self, file: int) -> None:
        try:
            # a lock by lockf would not exclude this process, and reading the file would drop it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            other = self._read()
            self.release()
            raise UserError(
                f"Process {other.get('process')} on {other.get('host')} trains in {self.path} since "
                f"{other.get('since')}. Wait until it has ended, or give another output_dir."
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): let no second process train there.", self.path, error)

    def release(self) -> None:
        """Let other trainers train in the folder."""
        if self._file is not None:
            with suppress(OSError):  # if it could not be locked
                fcntl.flock(self._file, fcntl.LOCK_UN)  # for forked workers, too
            os.close(self._file)
            self._file = None

    @property
    def began_without_a_checkpoint(self) -> bool:
        """Whether a run began in this folder, from no checkpoint, and has saved none."""
        return bool(self._run) and not self._run.get("began_from") and not self.checkpoints()

    def begin(self, resumed: str | None, step: int = 0, bases: Iterable[str] = ()) -> None:
        """Record that this process trains, and move aside the checkpoints that it does not resume from.

        Args:
            resumed: The checkpoint that is resumed, a folder or URL; None if training begins anew.
            step: The step of this checkpoint.
            bases: Names or folders of the base models of adapters that are trained. They must stay where they are.

        Raises:
            UserError: The folder cannot be written to, or a base model would be moved.
        """
        if not self._writes:
            return
        normalized = os.path.realpath if self.remote is None else str
        is_here = resumed is not None and normalized(os.path.dirname(resumed.rstrip("/"))) == normalized(self._place)
        with self._explaining():
            left = [name for name in self.checkpoints() if not is_here or step_of(name) > step]
            for base in bases:
                if any(Path(base).resolve().is_relative_to((self.path / name).resolve()) for name in left):
                    raise UserError(
                        f"The adapters' base model, {base}, is a checkpoint in output_dir={str(self.path)!r}, where a "
                        "new run saves its own checkpoints under the same names. Give another output_dir."
                    )
            if left:
                self._move_aside(left)
            earlier = self._run.get("resumed_at", []) if is_here else []
            self._run = {
                "host": socket.gethostname(),
                "process": os.getpid(),
                "since": datetime.now(UTC).isoformat(timespec="seconds"),
                "began_from": resumed,
                "resumed_at": [at for at in earlier if at < step] + [step] * (resumed is not None),
            }
            if self.remote is not None:
                self.remote.write_text(RUN_FILE, json.dumps(self._run))
            else:
                (self.path / RUN_FILE).write_text(json.dumps(self._run), encoding="utf-8")
                flush(self.path / RUN_FILE)

    def _move_aside(self, names: list[str]) -> None:
        below = f"{EARLIER_FOLDER}/{datetime.now():%Y%m%d-%H%M%S-%f}"
        if self.remote is not None:
            self.remote.move(names, below)
        else:
            (self.path / below).mkdir(parents=True)
            for name in names:
                (self.path / name).rename(self.path / below / name)
        logger.warning(
            "Moved checkpoints that this training does not resume from to %s/%s: %s. Delete them, or resume from one "
            "by name.",
            self._place,
            below,
            ", ".join(names),
        )

    def _read(self) -> dict[str, Any]:
        """Return the content of `_run.json`; nothing if it is torn, as a process that was killed may leave it."""
        text = None
        if self.remote is not None:
            text = self.remote.read_text(RUN_FILE)
        elif (self.path / RUN_FILE).is_file():
            text = (self.path / RUN_FILE).read_text(encoding="utf-8", errors="replace")
        with suppress(ValueError, TypeError):
            return dict(json.loads(text or ""))
        return {}

    def _explaining(self) -> AbstractContextManager[None]:
        return explaining(f"{self._place} cannot be written to", "Make room or mend it, or give another output_dir.")
