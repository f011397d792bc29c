"""Manage the folders of runs and checkpoints, on disk and at URLs.

Manifests distinguish complete checkpoints from damaged ones, staging folders hide unfinished ones, and a lock keeps
two runs from using one folder.
"""

import fcntl
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec

from ..config.reward_config import is_url
from ..errors import UserError
from .state_dict import PROGRESS_FILE, STATE_FOLDER

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"

STAGING_FOLDER = "_unfinished"

_FORMAT = 2

#: Moved into a model's folder last: loading begins with these files and then needs the rest.
_LAST_FILES = ("config.json", "adapter_config.json")

#: Files that resuming does not need: random states, and files that depend only on the new run's arguments.
_OPTIONAL = re.compile(r"rng_state.*\.pth|training_args\.bin|.*(token|vocab|config).*\.json|.*\.(jinja|md|model|txt)")

_CHECKPOINT_NAME = re.compile(r"checkpoint-\d+")

#: Size in bytes and SHA-256 of each file, by its path relative to the folder.
Files = dict[str, dict[str, Any]]


# ---- writing


def files_in(folder: Path) -> list[str]:
    """Return the names of all files below ``folder``."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def describe_files(folder: Path, names: Iterable[str]) -> Files:
    """Flush files below ``folder`` to disk and return their sizes and checksums."""
    paths = {name: folder / name for name in sorted(names)}
    for path in paths.values():
        flush(path)
    return {name: {"size": path.stat().st_size, "sha256": _sha256(path)} for name, path in paths.items()}


def seal(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the manifest: it declares the checkpoint complete and lists ``files`` as its content."""
    manifest = folder / MANIFEST_FILE
    manifest.write_text(json.dumps({"format": _FORMAT, "files": dict(files)}, indent=1), encoding="utf-8")
    for path in (manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        flush(path)


def publish(staging: Path, final: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a manifest of ``files`` to ``staging`` and rename the folder to ``final``, replacing an older one.

    If the process is killed at any moment, ``final`` is absent or complete.
    """
    seal(staging, files)
    if final.exists():
        retire(final)
    staging.rename(final)
    flush(final.parent)


def flush(path: Path) -> None:
    """Force a file, or a folder's entries, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- finding


def newest_first(names: Iterable[str]) -> list[str]:
    """Return the checkpoint names among ``names``, newest step first."""
    return sorted(filter(_CHECKPOINT_NAME.fullmatch, names), key=step_of, reverse=True)


def step_of(checkpoint: str) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.rpartition("-")[2])


def has_own_format(folder: str | Path) -> bool:
    """Return whether this package wrote a checkpoint. Such a checkpoint must have a manifest."""
    return any(Path(folder, name).exists() for name in (MANIFEST_FILE, PROGRESS_FILE, STATE_FOLDER))


def find_faults(folder: str | Path, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Check a checkpoint against its manifest, and return descriptions of its faults (empty for a good one).

    Files that the manifest does not list are ignored. A missing file that resuming does not need causes only a
    warning. Files outside of the folder are not read, even if the manifest lists them.

    Args:
        share: Index of the part of the files to check, and the number of parts. Checks all files by default.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            return [f"{MANIFEST_FILE} has format {manifest['format']}, but this version reads only format {_FORMAT}"]
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
        OSError: The path leads out of the folder.
    """
    root = os.path.realpath(folder)
    with suppress(ValueError):  # raised for a null character in the name
        path = Path(os.path.realpath(os.path.join(root, name)))
        if Path(root) in path.parents:
            return path
    raise OSError(f"{name!r} is outside of the folder")


def _file_fault(folder: Path, name: str, size: int, sha256: str) -> str | None:
    try:
        path = path_below(folder, name)
        if (actual := path.stat().st_size) != size:
            return f"{name} has {actual} bytes instead of {size}"
        return None if _sha256(path) == sha256 else f"{name} was altered (its SHA-256 differs)"
    except FileNotFoundError:
        if not _OPTIONAL.fullmatch(name):
            return f"{name} is missing"
        logger.warning("The checkpoint %s lacks %s. It can be resumed without this file.", folder, name)
        return None
    except OSError as error:
        return f"{name!r} cannot be read ({error})"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- staging


def staging_of(target: Path) -> Path:
    """Return the staging folder of ``target``: its files are written there first."""
    return target.parent / STAGING_FOLDER / target.name


def discard(staging: Path) -> None:
    """Remove a staging folder, and its parent if that is then empty."""
    shutil.rmtree(staging, ignore_errors=True)
    with suppress(OSError):
        staging.parent.rmdir()


def retire(folder: Path) -> None:
    """Delete a folder: first move it to staging, so that a killed process leaves no half-deleted folder."""
    retired = staging_of(folder.with_name(f"{folder.name}.retired"))
    discard(retired)
    retired.parent.mkdir(exist_ok=True)
    folder.rename(retired)
    discard(retired)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a staging folder for a model's files. On success, all files appear in ``folder`` at the end.

    A new folder appears by an atomic rename. An existing folder is kept and files are moved into it: it may be a mount
    point or a shell's working directory.
    """
    is_new = not folder.is_dir()
    staging = staging_of(folder if is_new else folder / "model")
    discard(staging)  # a killed process may have left one
    staging.mkdir(parents=True)
    try:
        yield staging
        if is_new:
            staging.rename(folder)
        else:
            for path in sorted(staging.iterdir(), key=lambda path: path.name in _LAST_FILES):
                if (target := folder / path.name).is_dir() and not target.is_symlink():
                    shutil.rmtree(target)  # a folder of an older adapter
                path.replace(target)
    finally:
        discard(staging)


# ---- a run


@contextmanager
def local_copy(folder: str | Path) -> Iterator[Path]:
    """Yield a local folder unchanged, or a URL's copy below TMPDIR. The copy is removed on exit."""
    if not is_url(str(folder)):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="trl-tpu-") as place:
        name = str(folder).rstrip("/").rpartition("/")[2]
        yield RemoteRun(str(folder)).get(Path(place) if name in ("", ".", "..") else Path(place, name))


class RemoteRun:
    """The files of a run at a URL."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files, self._root = fsspec.core.url_to_fs(self.url)

    def checkpoints(self) -> list[str]:
        """Return the names of complete checkpoints, newest step first."""
        manifests = self._files.glob(f"{glob.escape(self._root)}/checkpoint-*/{MANIFEST_FILE}")
        return newest_first(path.rsplit("/", 2)[-2] for path in manifests)

    def read_text(self, name: str) -> str:
        """Return the text of a file below the URL."""
        return self._files.cat_file(f"{self._root}/{name}").decode(errors="replace")

    def write_text(self, name: str, text: str) -> None:
        """Write a file below the URL."""
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(f"{self._root}/{name}", text.encode())

    def names(self) -> list[str]:
        """Return the names of files directly below the URL, not in its subfolders."""
        paths = self._files.find(self._root, maxdepth=1) if self._files.exists(self._root) else []
        return [path.rpartition("/")[2] for path in paths]

    def delete_files(self, names: Iterable[str]) -> None:
        """Delete files directly below the URL."""
        for name in names:
            self._files.rm_file(f"{self._root}/{name}")

    def move(self, checkpoints: Iterable[str], below: str) -> None:
        """Move checkpoints to the subfolder ``below``. Each one is copied before it is deleted."""
        for name in checkpoints:
            for path in self._files.find(f"{self._root}/{name}"):
                copy = f"{self._root}/{below}/{path.removeprefix(f'{self._root}/')}"
                self._files.makedirs(copy.rpartition("/")[0], exist_ok=True)
                self._files.cp_file(path, copy)
            self.delete(name)

    def put(self, folder: Path, names: Iterable[str], below: str = "") -> None:
        """Upload files of ``folder`` in the given order to the subfolder ``below``, by default to the URL itself."""
        for name in names:
            target = "/".join(filter(None, (self._root, below, name)))
            self._files.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            self._files.put_file(str(folder / name), target)

    def get(self, folder: Path) -> Path:
        """Download all files below the URL to ``folder``, and return ``folder``.

        Raises:
            OSError: The name of a file leads out of the folder: archives and object stores allow any name.
        """
        root = f"{self._root}/"
        copies = {path: path_below(folder, path.removeprefix(root)) for path in self._files.find(root)}
        for path, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(path, str(copy))
        return folder

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first: without it, a half-deleted checkpoint does not count as one."""
        folder = f"{self._root}/{name}"
        if self._files.exists(f"{folder}/{MANIFEST_FILE}"):
            self._files.rm_file(f"{folder}/{MANIFEST_FILE}")
        entries = self._files.find(folder, withdirs=True, detail=True)
        # delete one by one: `rm` expands patterns, so deleting run[1] would delete files of run1
        for path in sorted(entries, reverse=True):
            if entries[path]["type"] != "directory":
                self._files.rm_file(path)
            else:
                with suppress(OSError):  # object stores have no folders
                    self._files.rmdir(path)


RUN_FILE = "_run.json"


class RunFolder:
    """Finds, deletes and moves a run's checkpoints, and locks its folder.

    Args:
        path: The run's folder; for a run at a URL, the local folder from which its files are uploaded.
        remote: The run at its URL; None for a local run.
        writes: Whether this process writes to the folder or URL. One process per shared folder does.
    """

    def __init__(self, path: Path, remote: RemoteRun | None, writes: bool) -> None:
        self.path, self.remote, self._writes = path, remote, writes
        self._place = str(path) if remote is None else remote.url
        self._run: dict[str, Any] = {}  # the content of `_run.json`
        self._file: int | None = None  # descriptor of the locked `_run.json`

    # ---- its checkpoints

    def place_of(self, checkpoint: str) -> str:
        """Return the folder or URL of a checkpoint, given its name."""
        return f"{self._place}/{checkpoint}"

    def checkpoints(self) -> list[str]:
        """Return the names of checkpoints, newest step first. In a local folder, incomplete ones are included."""
        if self.remote is not None:
            return self.remote.checkpoints()
        return newest_first(path.name for path in self.path.glob("checkpoint-*") if path.is_dir())

    def rotate(self, limit: int | None, needed: set[str]) -> None:
        """Delete the oldest checkpoints until ``limit`` are left. Checkpoints in ``needed`` are never deleted."""
        try:
            kept_first = sorted(self.checkpoints() if (limit or 0) > 0 else (), key=lambda name: name not in needed)
            for name in [name for name in kept_first[limit:] if name not in needed][::-1]:
                if self.remote is not None:
                    self.remote.delete(name)
                else:
                    retire(self.path / name)
        except Exception as error:  # fsspec file systems raise many types of errors
            logger.warning("Older checkpoints in %s could not be deleted (%r).", self._place, error)

    # ---- the process that trains

    def claim(self) -> None:
        """Lock the folder against other trainers until `release`.

        Raises:
            UserError: Another trainer has the lock, in this process or another.
        """
        if self._writes and self.remote is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path / RUN_FILE, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                # unlike lockf, flock excludes trainers in this process too, and reading the file does not release it
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                owner = self._read()
                self.release()
                raise UserError(
                    f"Process {owner.get('process')} on {owner.get('host')} trains in {self.path} since "
                    f"{owner.get('since')}. Wait until it has ended, or set another output_dir."
                ) from None
            except OSError as error:
                logger.warning("%s cannot be locked (%s). Do not start a second run there.", self.path, error)
            for unfinished in (self.path / STAGING_FOLDER).glob("checkpoint-*"):  # left by a killed process
                discard(unfinished)
        self._run = self._read()

    def release(self) -> None:
        """Release the lock of `claim`."""
        if self._file is not None:
            with suppress(OSError):  # locking may have failed
                fcntl.flock(self._file, fcntl.LOCK_UN)  # closing alone leaves it locked in forked workers
            os.close(self._file)
            self._file = None

    @property
    def began_from(self) -> str | None:
        """Folder or URL of the checkpoint that the last training in this folder resumed from, or None."""
        return self._run.get("began_from")

    @property
    def began_without_a_checkpoint(self) -> bool:
        """True if a run began in this folder without resuming, and has not saved a checkpoint."""
        return bool(self._run) and not self.began_from and not self.checkpoints()

    def begin(self, resumed: str | None, step: int = 0, bases: Iterable[str] = ()) -> None:
        """Record that this process trains, and move away checkpoints that training does not continue from.

        Args:
            resumed: Folder or URL of the checkpoint to resume from; None if training starts from scratch.
            step: The step of this checkpoint. Later checkpoints in the folder are moved.
            bases: Names or folders of the base models of trained adapters. They must not be moved.

        Raises:
            UserError: A base model would be moved.
        """
        if not self._writes:
            return
        normalized = os.path.realpath if self.remote is None else str
        is_here = resumed is not None and normalized(os.path.dirname(resumed.rstrip("/"))) == normalized(self._place)
        unused = [name for name in self.checkpoints() if not is_here or step_of(name) > step]
        for base in bases:
            if any(Path(base).resolve().is_relative_to((self.path / name).resolve()) for name in unused):
                raise UserError(
                    f"The adapters' base model, {base}, is a checkpoint in output_dir={str(self.path)!r}. A new "
                    "run would save its own checkpoints under the same names. Set another output_dir."
                )
        if unused:
            self._move_to_earlier(unused)
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

    def _move_to_earlier(self, names: list[str]) -> None:
        below = f"_earlier/{datetime.now():%Y%m%d-%H%M%S-%f}"
        if self.remote is not None:
            self.remote.move(names, below)
        else:
            (self.path / below).mkdir(parents=True)
            for name in names:
                (self.path / name).rename(self.path / below / name)
        moved = f"Moved checkpoints that this training does not resume from to {self._place}/{below}"
        logger.warning("%s: %s. Delete them, or resume from one by name.", moved, ", ".join(names))

    def _read(self) -> dict[str, Any]:
        """Return the content of `_run.json`; empty if it is missing, or incomplete after its process was killed."""
        with suppress(FileNotFoundError, ValueError, TypeError):
            if self.remote is not None:
                return dict(json.loads(self.remote.read_text(RUN_FILE)))
            return dict(json.loads((self.path / RUN_FILE).read_text(encoding="utf-8", errors="replace")))
        return {}
