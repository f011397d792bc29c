"""Work that goes on beside training: a save whose state is already on the host."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

logger = logging.getLogger(__name__)

#: The exit status of a run of which a checkpoint could not be saved: EX_IOERR of sysexits.h.
NOT_SAVED = 74

#: The exit status of a run whose best model could not be loaded at its end: EX_CANTCREAT of sysexits.h.
BEST_LOST = 73


class BackgroundSaves:
    """Writes one save at a time on a thread. What fails is loud and counted, and training goes on."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self._pending: Future[None] | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def submit(self, name: str, write: Callable[[], None]) -> None:
        """Begin with ``write``, after the save before it."""
        self.wait()
        self._pending = self._pool.submit(self._try, name, write)

    def wait(self) -> None:
        """Wait until what was submitted is written, or has failed."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def fail(self, name: str, error: BaseException) -> None:
        """Count a save that has failed."""
        self.failed.append(name)
        logger.error(
            "%s was NOT saved (%s: %s). Training goes on, and earlier checkpoints stay; make room or mend the folder.",
            name,
            type(error).__name__,
            error,
            exc_info=error,
        )

    def _try(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # whatever a file system, a serializer or another host can say
            self.fail(name, error)
