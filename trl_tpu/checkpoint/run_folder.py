"""The folder of a run: who owns it, what a new run moves aside, and its mirror at a URL."""

import contextlib
import fcntl
import glob
import json
import logging
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec

from ..config.reward_config import is_url
from ..errors import UserError
from .manifest import MANIFEST_FILE, STAGING_FOLDER, discard, flush, newest_first, path_below, retire

logger = logging.getLogger(__name__)


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


RUN_FILE = "_run.json"
EARLIER_FOLDER = "_earlier"


class RunFolder:
    """Finds, deletes and moves a run's checkpoints, and locks its folder.

    Args:
        path: The folder; for a run at a URL a folder of this machine through which its files pass.
        remote: The run at a URL, if that is where it is kept.
        writes: Whether this process is the one that writes there.
    """

    def __init__(self, path: Path, remote: RemoteRun | None, writes: bool) -> None:
        self.path, self.remote, self._writes = path, remote, writes
        self._run: dict[str, Any] = {}  # what `_run.json` says
        self._file: int | None = None

    # ---- its checkpoints

    def place_of(self, checkpoint: str) -> str:
        """Return the folder, or URL, of a checkpoint by its name."""
        return str(self.path / checkpoint) if self.remote is None else f"{self.remote.url}/{checkpoint}"

    def checkpoints(self) -> list[str]:
        """Return the names of checkpoints, the last step first; of those in a folder of this machine, whole or not."""
        if self.remote is not None:
            return self.remote.checkpoints()
        return newest_first(path.name for path in self.path.glob("checkpoint-*") if path.is_dir())

    def rotate(self, limit: int | None, needed: set[str]) -> None:
        """Delete checkpoints, first steps first, until ``limit`` are left; none that is ``needed``."""
        try:
            found = self.checkpoints() if limit is not None and limit > 0 else []
            surplus = len(found) - max(limit or 0, len(needed.intersection(found)))
            for name in [name for name in found[::-1] if name not in needed][: max(surplus, 0)]:
                self._delete(name)
        except Exception as error:  # file systems of fsspec say it in errors of many kinds
            kind = type(error).__name__
            logger.warning("Older checkpoints in %s could not be deleted (%s: %s).", self._where, kind, error)

    def _delete(self, name: str) -> None:
        if self.remote is not None:
            self.remote.delete(name)
        else:
            retire(self.path / name)

    # ---- the process that trains

    def claim(self) -> None:
        """Keep other trainers from training in the folder, until `release`.

        Raises:
            UserError: One does already, here or in another process, or the folder cannot be written to.
        """
        with self._or_refused():
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
            with contextlib.suppress(OSError):  # where it could not be locked
                fcntl.flock(self._file, fcntl.LOCK_UN)  # for forked workers, too
            os.close(self._file)
            self._file = None

    @property
    def began_without_a_checkpoint(self) -> bool:
        """Whether a run began in this folder, from no checkpoint, and has saved none."""
        return bool(self._run) and not self._run.get("began_from") and not self.checkpoints()

    def begin(self, resumed: str | None, step: int = 0, bases: Iterable[str] = ()) -> None:
        """Write down that this process trains, and move aside the checkpoints that it does not go on from.

        Args:
            resumed: The checkpoint that training goes on from, a folder or URL; None where it begins anew.
            step: Of this checkpoint.
            bases: Names or folders of the base models of adapters that are trained. They must stay where they are.

        Raises:
            UserError: The folder cannot be written to, or a base model would be moved.
        """
        if not self._writes:
            return
        is_here = resumed is not None and self._has(resumed)
        with self._or_refused():
            left = [name for name in self.checkpoints() if not is_here or _step_of(name) > step]
            for base in bases:
                if any(Path(base).resolve().is_relative_to((self.path / name).resolve()) for name in left):
                    raise UserError(
                        f"The adapters' base model, {base}, is a checkpoint in output_dir={str(self.path)!r}, where a "
                        "new run saves its own checkpoints under the same names. Give another output_dir."
                    )
            self._move_aside(left)
            earlier = self._run.get("resumed_at", []) if is_here else []
            self._write(
                {
                    "host": socket.gethostname(),
                    "process": os.getpid(),
                    "since": datetime.now(UTC).isoformat(timespec="seconds"),
                    "began_from": resumed,
                    "resumed_at": [at for at in earlier if at < step] + [step] * (resumed is not None),
                }
            )

    # ---- files, here or at the URL

    @property
    def _where(self) -> str:
        return str(self.path) if self.remote is None else self.remote.url

    def _has(self, checkpoint: str) -> bool:
        """Tell whether a checkpoint, by its folder or URL, lies in this folder."""
        place, _, _ = checkpoint.rstrip("/").rpartition("/")
        if self.remote is not None:
            return place == self.remote.url
        return os.path.realpath(place) == os.path.realpath(self.path)

    def _read(self) -> dict[str, Any]:
        """Return what `_run.json` says; nothing where it is torn, as a process that was killed may leave it."""
        text = ""
        if self.remote is not None:
            text = self.remote.read_text(RUN_FILE) or ""
        elif (self.path / RUN_FILE).is_file():
            text = (self.path / RUN_FILE).read_text(encoding="utf-8", errors="replace")
        with contextlib.suppress(ValueError, TypeError):
            return dict(json.loads(text))
        return {}

    def _write(self, run: dict[str, Any]) -> None:
        self._run, text = run, json.dumps(run)
        if self.remote is not None:
            self.remote.write_text(RUN_FILE, text)
        else:
            (self.path / RUN_FILE).write_text(text, encoding="utf-8")
            flush(self.path / RUN_FILE)

    def _move_aside(self, names: list[str]) -> None:
        if not names:
            return
        place = f"{EARLIER_FOLDER}/{datetime.now():%Y%m%d-%H%M%S-%f}"
        if self.remote is not None:
            self.remote.move(names, place)
        else:
            (self.path / place).mkdir(parents=True)
            for name in names:
                (self.path / name).rename(self.path / place / name)
        logger.warning(
            "%s had checkpoints that this training does not go on from: %s. They are in its %s now, to be deleted, or "
            "to resume from by name.",
            self._where,
            ", ".join(names),
            place,
        )

    def _or_refused(self) -> contextlib.AbstractContextManager[None]:
        return refusing(f"{self._where} cannot be written to", "Make room or mend it, or give another output_dir.")


def _step_of(name: str) -> int:
    return int(name.rpartition("-")[2])
