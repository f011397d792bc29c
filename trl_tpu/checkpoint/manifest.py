"""Manifests tell complete checkpoints from damaged ones; staging folders keep unfinished ones invisible."""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
def fill_aside(folder: Path) -> Iterator[Path]:
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
