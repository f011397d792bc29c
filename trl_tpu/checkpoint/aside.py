"""Folders that are written aside and then renamed, or their files are: each is there complete, or not at all.

What is not complete lies in the folder `_unfinished` beside its place: a rename within one file system is atomic.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

STAGING_FOLDER = "_unfinished"

#: without these nothing loads a model's folder, so they are moved to it last
_LAST = ("config.json", "adapter_config.json")


def staging_of(target: Path) -> Path:
    """Return where a folder is written before it is complete."""
    return target.parent / STAGING_FOLDER / target.name


def discard(staging: Path) -> None:
    """Remove what is in staging, and the staging folder where nothing else is in it."""
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
    """Give a folder to write a model's files in, which are in ``folder`` when all are written.

    A new one appears then. One that is there stays, and they are moved to it: a mount point cannot be replaced, and a
    shell may be in it.
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
