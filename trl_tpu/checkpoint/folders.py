"""Folders on disk and their mirrors at URLs.

Manifests tell complete checkpoints from damaged ones, staging folders keep unfinished ones invisible, and a run locks
its folder.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec

from ..config.reward_config import is_url
from ..errors import UserError, explaining
from .state_dict import PROGRESS_FILE, STATE_FOLDER

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"

STAGING_FOLDER = "_unfinished"

_FORMAT = 2

#: loading a model's folder begins with these, so they are moved to it last
_LAST = ("config.json", "adapter_config.json")

#: files without which a run can be resumed: random states, and what the new run's arguments give
_SPARE = re.compile(r"rng_state.*\.pth|training_args\.bin|.*(token|vocab|config).*\.json|.*\.(jinja|md|model|txt)")

_CHECKPOINT = re.compile(r"checkpoint-\d+")

Files = dict[str, dict[str, Any]]
"""Size and SHA-256 of each file, by its path below the folder."""


# ---- writing


def files_in(folder: Path) -> list[str]:
    """Return the names of all files below ``folder``."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def describe_files(folder: Path, names: Iterable[str]) -> Files:
    """Flush files below ``folder`` to disk and return their sizes and checksums."""
    files = {}
    for name in sorted(names):
        path = folder / name
        flush(path)
        files[name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    return files


def seal(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the manifest, which declares that ``files`` are all of the checkpoint."""
    manifest = folder / MANIFEST_FILE
    manifest.write_text(json.dumps({"format": _FORMAT, "files": dict(files)}, indent=1), encoding="utf-8")
    for path in (manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        flush(path)


def publish(staging: Path, final: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Seal the folder ``staging`` with a manifest of ``files`` and rename it to ``final``; an older one is replaced.

    A kill at any moment leaves ``final`` absent or complete.
    """
    seal(staging, files)
    if final.exists():
        retire(final)
    staging.rename(final)
    flush(final.parent)


def flush(path: Path) -> None:
    """Have the operating system write a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- finding


def newest_first(names: Iterable[str]) -> list[str]:
    """Return the names of checkpoints among ``names``, the last step first."""
    return sorted(filter(_CHECKPOINT.fullmatch, names), key=step_of, reverse=True)


def step_of(checkpoint: str) -> int:
    """Return the step of a checkpoint by its name."""
    return int(checkpoint.rpartition("-")[2])


def is_ours(folder: str | Path) -> bool:
    """Tell whether a checkpoint was written by this package, and so has to have a manifest."""
    return any(Path(folder, name).exists() for name in (MANIFEST_FILE, PROGRESS_FILE, STATE_FOLDER))


def find_faults(folder: str | Path, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return the faults of a checkpoint by its manifest; empty for a good one.

    Files that the manifest does not name are no fault. If a file is missing that a resumed run does not need, a
    warning names it. Only regular files in the folder are looked at, whatever the manifest names.

    Args:
        share: The part of the files to look at, and the number of parts they are divided into.
    """
    folder = Path(folder)
    try:
        manifest = json.loads(_regular(folder, MANIFEST_FILE).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            return [f"{MANIFEST_FILE} has format {manifest['format']}, and this version reads format {_FORMAT}"]
        expected = {str(name): (int(file["size"]), str(file["sha256"])) for name, file in manifest["files"].items()}
    except FileNotFoundError:
        return [f"it has no {MANIFEST_FILE}"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{MANIFEST_FILE} cannot be read ({type(error).__name__}: {error})"]
    faults = (_file_fault(folder, name, *file) for name, file in list(expected.items())[share[0] :: share[1]])
    return [fault for fault in faults if fault]


def path_below(folder: str | Path, name: str) -> Path:
    """Return the path of ``name`` in ``folder``, with links resolved.

    Raises:
        OSError: It leads out of the folder.
    """
    root = os.path.realpath(folder)
    with contextlib.suppress(ValueError):  # of a null character
        path = Path(os.path.realpath(os.path.join(root, name)))
        if Path(root) in path.parents:
            return path
    raise OSError(f"{name!r} is outside of the folder")


def _regular(folder: Path, name: str) -> Path:
    """Return the path of a regular file below ``folder``; reading a device or a pipe might never end."""
    path = path_below(folder, name)
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")
    return path


def _file_fault(folder: Path, name: str, size: int, sha256: str) -> str | None:
    try:
        path = _regular(folder, name)
        if (actual := path.stat().st_size) != size:
            return f"{name} has {actual} bytes instead of {size}"
        return None if _sha256(path) == sha256 else f"{name} was altered (its SHA-256 is another)"
    except FileNotFoundError:
        if not _SPARE.fullmatch(name):
            return f"{name} is missing"
        logger.warning("The checkpoint %s lacks %s, without which it can be resumed.", folder, name)
        return None
    except OSError as error:
        return f"{name!r} cannot be read ({error})"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- staging


def staging_of(target: Path) -> Path:
    """Return where a folder is written before it is complete."""
    return target.parent / STAGING_FOLDER / target.name


def discard(staging: Path) -> None:
    """Remove a folder in staging, and the staging folder itself if it is empty then."""
    shutil.rmtree(staging, ignore_errors=True)
    with contextlib.suppress(OSError):
        staging.parent.rmdir()


def retire(folder: Path) -> None:
    """Delete a folder, invisible first: a kill leaves none with some of its files."""
    retired = staging_of(folder.with_name(f"{folder.name}.retired"))
    discard(retired)
    retired.parent.mkdir(exist_ok=True)
    folder.rename(retired)
    discard(retired)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Give a staging folder to write a model's files in; they appear in ``folder`` when all are written.

    A new folder appears by a rename. An existing folder is kept and files are moved into it: it may be a mount point
    or a shell's working directory.
    """
    is_new = not folder.is_dir()
    staging = staging_of(folder if is_new else folder / "model")
    discard(staging)  # of a process that was killed
    staging.mkdir(parents=True)
    try:
        yield staging
        if is_new:
            staging.rename(folder)
        else:
            for path in sorted(staging.iterdir(), key=lambda path: path.name in _LAST):
                if (target := folder / path.name).is_dir() and not target.is_symlink():
                    shutil.rmtree(target)  # another adapter's
                path.replace(target)
    finally:
        discard(staging)


# ---- a run


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
    def began_from(self) -> str | None:
        """The checkpoint from which training last began in this folder, a folder or URL; None if from none."""
        return self._run.get("began_from")

    @property
    def began_without_a_checkpoint(self) -> bool:
        """Whether a run began in this folder, from no checkpoint, and has saved none."""
        return bool(self._run) and not self.began_from and not self.checkpoints()

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
