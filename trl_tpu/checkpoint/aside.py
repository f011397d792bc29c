"""Files and folders that are written aside and then renamed: each is there complete, or not at all.

What is not complete lies in the folder `_unfinished` beside its place: a rename within one file system is atomic.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

STAGING_FOLDER = "_unfinished"

#: without these nothing loads a model's folder, so they are moved to it last
_LAST = ("config.json", "adapter_config.json")


def staging_of(target: Path) -> Path:
    """Return where a file or folder is written before it is complete."""
    return target.parent / STAGING_FOLDER / target.name


def discard(staging: Path) -> None:
    """Remove what is in staging, and the staging folder where nothing else is in it."""
    with contextlib.suppress(OSError):
        shutil.rmtree(staging) if staging.is_dir() else staging.unlink(missing_ok=True)
        staging.parent.rmdir()


def retire(folder: Path) -> None:
    """Delete a folder, invisible first: a kill leaves none with some of its files."""
    retired = staging_of(folder.with_name(f"{folder.name}.retired"))
    discard(retired)
    retired.parent.mkdir(exist_ok=True)
    folder.rename(retired)
    discard(retired)


@contextlib.contextmanager
def write_aside(target: Path) -> Iterator[Path]:
    """Give the path to write a file or a folder at; it is renamed to ``target`` at the end, or removed on an error."""
    staging = staging_of(target)
    discard(staging)  # of a process that was killed
    staging.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield staging
        os.replace(staging, target)
    finally:
        discard(staging)


@contextlib.contextmanager
def fill_aside(folder: Path) -> Iterator[Path]:
    """Give a folder to write a model's files in; they are moved to ``folder``, which stays, when all are written."""
    staging = staging_of(folder / "model")
    discard(staging)
    staging.mkdir(parents=True)
    try:
        yield staging
        for path in sorted(staging.iterdir(), key=lambda path: path.name in _LAST):
            if (target := folder / path.name).is_dir() and not target.is_symlink():
                shutil.rmtree(target)  # another adapter's
            path.replace(target)
    finally:
        discard(staging)
