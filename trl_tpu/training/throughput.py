"""How fast training goes, between two logs: by the host's clock, from counts that a log reads anyway."""

import time
from collections.abc import Callable

from ..evaluation.reward_sums import RewardSums


class Throughput:
    """Measures what training does in a second; evaluations and saves are left out, compiles are not.

    Work is what training needs by formula, see `trl_tpu.modeling.work`: tokens that a pair's dialogues share count
    once, padding never.

    Args:
        clock: Seconds from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.start(None, None, RewardSums(), 0)

    def start(self, work_of_a_pair: float | None, peak_flops: float | None, before: RewardSums, step: int) -> None:
        """Begin a run.

        Args:
            work_of_a_pair: Operations that an average pair needs; None where that is not known.
            peak_flops: Of all devices together, in FLOP/s; None where that is not known.
            before: What the next log counts, but an earlier run has done.
            step: The last one of the earlier run, or 0.
        """
        self._work, self._peak, self._before, self._step = work_of_a_pair, peak_flops, before, step
        self._seconds, self._since = 0.0, self._clock()

    def pause(self) -> None:
        """Leave out what is done until `resume`."""
        self._seconds += self._clock() - self._since

    def resume(self) -> None:
        self._since = self._clock()

    def close(self, sums: RewardSums, step: int) -> dict[str, float]:
        """Return the rates since the last log, and measure anew.

        Args:
            sums: Of all processes since then.
            step: The step that was just done.
        """
        self.pause()
        self.resume()
        seconds, self._seconds = self._seconds, 0.0
        pairs, tokens = sums.pairs - self._before.pairs, sums.tokens - self._before.tokens
        steps = step - self._step
        self._before, self._step = RewardSums(), step
        if pairs <= 0 or seconds <= 0:
            return {}
        rates = {"pairs_per_second": pairs / seconds, "tokens_per_second": tokens / seconds}
        if steps > 0:
            rates["seconds_per_step"] = seconds / steps
        if self._work is not None:
            flops = self._work * pairs / seconds
            rates["model_tflops_per_second"] = flops / 1e12
            if self._peak is not None:
                rates["mfu"] = flops / self._peak
        return rates
