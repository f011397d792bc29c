"""A run's folder: which run its checkpoints are of, and which process trains there.

A run gets an id when training begins anew and keeps it when it is resumed. Its checkpoints have the id in their
manifests, and its folder has it in `_run.json`, with the host and the process that train. When training begins,
checkpoints that it does not go on from are moved to `_earlier/`: so the newest in a folder is always of its run.

While a process trains, `_run.json` is locked. The system lets go of the lock when the process ends, however it does.
Where files cannot be locked, at a URL and on some network file systems, the last process to begin has the folder, and
saves of one before it fail.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UserError
from .manifest import MANIFEST_FILE, REPLACED, RUN_ID, checkpoints_in, find_faults, run_in
from .remote import RemoteRun

RUN_FILE = "_run.json"
EARLIER_FOLDER = "_earlier"
# beside the checkpoints, since a rename within one file system is atomic; uploads leave out what begins so
STAGING_FOLDER = "_unfinished"
SAVING = "_saving-"
"""How a folder begins in which a model is written before it is whole; the run's id follows."""

logger = logging.getLogger(__name__)


class RunFolder:
    """Where a run's checkpoints are, here or at a URL.

    Args:
        path: The folder; for a run at a URL a folder of this machine through which its files pass.
        remote: The run at a URL, if that is where it is kept.
        writes: Whether this process is the one that writes there.
    """

    def __init__(self, path: Path, remote: RemoteRun | None, writes: bool) -> None:
        self.path, self._remote, self._writes = path, remote, writes
        self.run = uuid.uuid4().hex[:12]
        """The id of the run."""
        self._found: dict[str, Any] = {}  # what the folder said when this process came
        self._file: int | None = None
        self._said = ""

    @property
    def staging(self) -> Path:
        """Where a checkpoint is written before it is whole; no other run writes there."""
        return self.path / STAGING_FOLDER / self.run

    def clear_staging(self) -> None:
        """Remove what this run has in its staging folder, and that of all runs if it is empty then."""
        shutil.rmtree(self.staging, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.staging.parent.rmdir()

    @property
    def _where(self) -> str:
        return str(self.path) if self._remote is None else self._remote.url

    def claim(self) -> None:
        """Keep other processes from training in the folder, until `release`.

        Raises:
            UserError: One does already, or the folder cannot be written to.
        """
        if self._writes and self._remote is None:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path / RUN_FILE, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise self._unwritable(error) from error
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                other = self._read()
                self.release()
                raise UserError(
                    f"Process {other.get('process')} on {other.get('host')} trains in {self.path} since "
                    f"{other.get('since')}. Wait until it has ended, or give another output_dir."
                ) from None
            except OSError as error:
                logger.warning("%s cannot be locked (%s): let no second process train there.", self.path, error)
            self._recover()
        try:
            self._found = self._read()
        except Exception as error:  # file systems of fsspec say it in errors of many kinds
            raise self._unwritable(error) from error

    def release(self) -> None:
        """Let other processes train in the folder."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def is_foreign(self, checkpoint: str | Path) -> bool:
        """Tell whether a checkpoint of this folder is not of its run; False where the folder names none."""
        if "run" not in self._found or Path(checkpoint).name == self._found.get("began_from"):
            return False
        return self._run_of(Path(checkpoint).name) != self._found["run"]

    @property
    def began_without_a_checkpoint(self) -> bool:
        """Whether a run began in this folder that was stopped before its first checkpoint."""
        found = self._found
        return "run" in found and not found.get("began_from") and not found.get("ended") and not self._checkpoints()

    def begin(
        self, run: str, resumed: str | None, step: int = 0, saved_run: str | None = None, best: str | None = None
    ) -> None:
        """Write down that this process trains ``run``, and move aside what it does not go on from.

        Args:
            run: The id, the same in all processes.
            resumed: The checkpoint that training goes on from, a folder or URL; None where it begins anew.
            step: Of this checkpoint.
            saved_run: The run that it is of; None for one of another trainer.
            best: The name of this run's best checkpoint.

        Raises:
            UserError: The folder cannot be written to.
        """
        self.run = run
        if not self._writes:
            return
        try:
            found = self._checkpoints()
            is_here = resumed is not None and self._has(resumed)
            before = [name for name in found if is_here and int(name.rpartition("-")[2]) <= step]
            kept = [name for name in before if name == best or self._run_of(name) == saved_run]
            self._move_aside([name for name in found if name not in kept])
            since = datetime.now(UTC).isoformat(timespec="seconds")
            owner = {"run": run, "host": socket.gethostname(), "process": os.getpid(), "since": since}
            began_from = Path(resumed).name if resumed is not None and is_here else resumed
            earlier = self._found.get("resumed_at", []) if self._found.get("run") == run else []
            resumed_at = [at for at in earlier if isinstance(at, int) and at < step] + [step] * (resumed is not None)
            begun = {"began_from": began_from, "resumed_at": resumed_at, "claim": uuid.uuid4().hex}
            self._write(json.dumps(owner | begun))
        except Exception as error:
            raise self._unwritable(error) from error

    def check_owner(self) -> None:
        """Make sure that no other process has begun to train here.

        Raises:
            OSError: One has.
        """
        if self._said and (said := self._text()) != self._said:
            other = _parsed(said)
            raise OSError(
                f"process {other.get('process')} on {other.get('host')} trains there since {other.get('since')}"
            )

    def end(self) -> None:
        """Write down that the run has come to its end, whether or not it has saved checkpoints."""
        if self._said:
            try:
                self._write(json.dumps(_parsed(self._said) | {"ended": True}))
            except Exception as error:  # file systems of fsspec say it in errors of many kinds
                logger.warning("%s could not be marked as ended (%s): the model is trained.", self._where, error)

    # ---- files, here or at the URL

    def _has(self, checkpoint: str) -> bool:
        """Tell whether a checkpoint, by its folder or URL, lies in this folder."""
        place, _, _ = checkpoint.rstrip("/").rpartition("/")
        if self._remote is not None:
            return place == self._remote.url
        return os.path.realpath(place) == os.path.realpath(self.path)

    def _text(self) -> str:
        if self._remote is not None:
            return self._remote.read_text(RUN_FILE) or ""
        if self._file is not None:  # to close another handle of the file would unlock it
            return os.pread(self._file, 1 << 16, 0).decode(errors="replace")
        with contextlib.suppress(FileNotFoundError):
            return (self.path / RUN_FILE).read_text(encoding="utf-8", errors="replace")
        return ""

    def _read(self) -> dict[str, Any]:
        return _parsed(self._text())

    def _write(self, text: str) -> None:
        self._said = text
        if self._remote is not None:
            self._remote.write_text(RUN_FILE, text)
        elif self._file is not None:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text.encode(), 0)
            os.fsync(self._file)

    def _checkpoints(self) -> list[str]:
        if self._remote is not None:
            return self._remote.checkpoints()
        return [path.name for path in checkpoints_in(self.path)]

    def _run_of(self, name: str) -> str | None:
        """Return the run that a checkpoint says it is of; None where it says nothing."""
        if self._remote is not None:
            return run_in(self._remote.read_text(f"{name}/{MANIFEST_FILE}") or "")
        with contextlib.suppress(OSError):
            return run_in((self.path / name / MANIFEST_FILE).read_text(errors="replace"))
        return None

    def _move_aside(self, names: list[str]) -> None:
        if not names:
            return
        place = f"{EARLIER_FOLDER}/{datetime.now():%Y%m%d-%H%M%S-%f}"
        if self._remote is not None:
            self._remote.move(names, place)
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

    def _recover(self) -> None:
        """Put back a checkpoint that was being replaced when its process was killed; remove what else it left."""
        places = [*(self.path / STAGING_FOLDER).glob("*"), *self.path.glob(f"{SAVING}*")]
        for left in [path for path in places if RUN_ID.fullmatch(path.name.removeprefix(SAVING))]:
            for replaced in left.glob(f"checkpoint-*{REPLACED}"):
                whole = self.path / replaced.name.removesuffix(REPLACED)
                if not whole.exists() and not find_faults(replaced):
                    replaced.rename(whole)
            shutil.rmtree(left, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.path / STAGING_FOLDER).rmdir()

    def _unwritable(self, error: Exception) -> UserError:
        return UserError(
            f"{self._where} cannot be written to ({error}). Make room or mend it, or give another output_dir."
        )


def _parsed(text: str) -> dict[str, Any]:
    """Return a JSON object; an empty one for anything else, as a process that was killed may leave."""
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        return value if isinstance(value, dict) else {}
    return {}
