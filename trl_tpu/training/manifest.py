"""A checkpoint is complete or invisible: written aside, sealed with a manifest, flushed to disk, renamed.

The manifest names every file with its size and SHA-256, so that a torn or altered checkpoint is found before loading.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path

MANIFEST_FILE = "manifest.json"
ASIDE_FOLDER = ".unfinished"  # beside the checkpoints: a rename within one file system is atomic
_FORMAT = 1
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")

logger = logging.getLogger(__name__)


def publish(aside: Path, final: Path) -> None:
    """Seal the folder ``aside`` and rename it to ``final``; an older ``final`` is replaced.

    A kill at any moment leaves ``final`` absent or complete. Where it existed, it may be left absent for the instant
    between two renames; its older version then still lies in the aside folder.
    """
    _seal(aside)
    replaced = aside.with_name(f"{aside.name}.replaced")
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def faults(folder: str | Path) -> list[str]:
    """What is wrong with a checkpoint by its own manifest; empty for a good one.

    Files beside those of the manifest are no fault.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        if manifest["format"] > _FORMAT:
            return [f"{MANIFEST_FILE} has format {manifest['format']}, and this version reads up to {_FORMAT}"]
        expected = {str(name): (int(file["size"]), str(file["sha256"])) for name, file in manifest["files"].items()}
    except FileNotFoundError:
        return [f"it has no {MANIFEST_FILE}"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST_FILE} cannot be read ({type(error).__name__}: {error})"]
    found = (_file_fault(folder / name, name, size, digest) for name, (size, digest) in expected.items())
    return [fault for fault in found if fault]


def newest_good(output_dir: str | Path) -> str:
    """The checkpoint of the highest step that is whole; those that are not are named in warnings.

    Raises:
        ValueError: There is none; it names what was found.
    """
    output_dir = Path(output_dir)
    folders = [path for path in output_dir.glob("checkpoint-*") if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    rejected = []
    for folder in sorted(folders, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True):
        if not (wrong := faults(folder)):
            return str(folder)
        rejected.append(f"{folder}: {'; '.join(wrong)}")
        logger.warning("Skipping the checkpoint %s", rejected[-1])
    listing = "".join(f"\n  {line}" for line in rejected) or " no folder checkpoint-N at all"
    raise ValueError(
        f"resume_from_checkpoint=True, but {output_dir} has no good checkpoint. Found:{listing}\n"
        "Give the folder of a checkpoint, or leave resume_from_checkpoint out to start anew."
    )


def check_given(folder: str | Path) -> None:
    """Refuse a damaged checkpoint that was asked for by name; one of another trainer has no manifest and may pass.

    Raises:
        ValueError: Its files are not those of its manifest.
    """
    if not (Path(folder) / MANIFEST_FILE).exists():
        logger.warning("The checkpoint %s has no %s, so its files cannot be checked.", folder, MANIFEST_FILE)
    elif wrong := faults(folder):
        raise ValueError(
            f"The checkpoint {folder} is damaged: {'; '.join(wrong)}. "
            "Give another folder, or resume_from_checkpoint=True for the newest good one."
        )


def _seal(folder: Path) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": _digest(path)}
        _flush(path)
    manifest = folder / MANIFEST_FILE
    manifest.write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1), encoding="utf-8")
    _flush(manifest)
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        _flush(path)


def _file_fault(path: Path, name: str, size: int, digest: str) -> str | None:
    try:
        if (actual := path.stat().st_size) != size:
            return f"{name} has {actual} bytes instead of {size}"
        return None if _digest(path) == digest else f"{name} was altered (its SHA-256 is another)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error})"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
