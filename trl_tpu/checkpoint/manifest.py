"""The files of a checkpoint and their sizes, by which a whole one is told; folders that are moved aside."""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from ..errors import UserError
from .state_dict import PROGRESS_FILE, STATE_FOLDER

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
_FORMAT = 2
# what a run is resumed without: random numbers, settings and the tokenizer, which the new run's arguments give
_SPARE = re.compile(r"rng_state.*\.pth|training_args\.bin|.*(token|vocab|config).*\.json|.*\.(jinja|md|model|txt)")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")

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
    """Write the manifest of ``files``, which says that they are all."""
    manifest = folder / MANIFEST_FILE
    manifest.write_text(json.dumps({"format": _FORMAT, "files": dict(files)}, indent=1), encoding="utf-8")
    flush(manifest)
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
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
    """Return those that are names of checkpoints, the last step first."""
    steps = {name: int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def is_ours(folder: str | Path) -> bool:
    """Tell whether a checkpoint was written by this package, and so has to have a manifest."""
    return any(Path(folder, name).exists() for name in (MANIFEST_FILE, PROGRESS_FILE, STATE_FOLDER))


def find_faults(folder: str | Path, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return what is wrong with a checkpoint by its manifest; empty for a good one.

    Files beside those of the manifest are no fault, nor is the lack of one that a resumed run does not need: a warning
    names it. Only regular files in the folder are looked at, whatever the manifest names.

    Args:
        share: Which part of the files to look at, and into how many parts they are divided.
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
    part, parts = share
    shared = list(expected.items())[part::parts]
    found = (_file_fault(folder, name, size, sha256) for name, (size, sha256) in shared)
    return [fault for fault in found if fault]


def newest_good(checkpoints: Iterable[str], examine: Callable[[str], list[str]] = find_faults) -> str:
    """Return the first of ``checkpoints`` that is whole; those before it are named in warnings.

    Args:
        examine: Says what is wrong with a checkpoint.

    Raises:
        UserError: There is none; it names what was found.
    """
    rejected = []
    for folder in checkpoints:
        if not (wrong := examine(folder)):
            return folder
        rejected.append(f"{folder}: {'; '.join(wrong)}")
        logger.warning("Skipping the checkpoint %s", rejected[-1])
    listing = "".join(f"\n  {line}" for line in rejected) or " no folder checkpoint-N at all"
    raise UserError(
        f"resume_from_checkpoint=True, but output_dir has no good checkpoint. Found:{listing}\n"
        "Give the folder of a checkpoint, or leave resume_from_checkpoint out to start anew."
    )


def check_given(folder: str, examine: Callable[[str], list[str]] = find_faults) -> None:
    """Refuse a damaged checkpoint that was named; one of another trainer has no manifest and may pass.

    Raises:
        UserError: There is none, or its files are not those of its manifest; one of ours has to have one.
    """
    ours = is_ours(folder)
    if not ours and not Path(folder, TRAINER_STATE_NAME).is_file():
        raise UserError(
            f"resume_from_checkpoint={folder!r} is no checkpoint: it has no {TRAINER_STATE_NAME}. Give one, "
            "or True for the newest good one of output_dir. To start from a model's weights, give it as the model."
        )
    if not ours:
        logger.warning("The checkpoint %s has no %s, so its files cannot be checked.", folder, MANIFEST_FILE)
    elif wrong := examine(folder):
        raise UserError(
            f"The checkpoint {folder} is damaged: {'; '.join(wrong)}. "
            "Give another folder, or resume_from_checkpoint=True for the newest good one."
        )


def path_below(folder: str | Path, name: str) -> Path | None:
    """Return the path of ``name``, with links resolved; None if that is not below ``folder``."""
    root = os.path.realpath(folder)
    try:
        path = Path(os.path.realpath(os.path.join(root, name)))
    except ValueError:  # a null character
        return None
    return path if Path(root) in path.parents else None


def _regular(folder: Path, name: str) -> Path:
    """Return the path of a regular file below ``folder``; reading a device or a pipe might never end.

    Raises:
        OSError: It is none, is elsewhere, or is missing.
    """
    path = path_below(folder, name)
    if path is None or not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file in the folder")
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
