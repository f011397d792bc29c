"""Statistics of training steps: summed on the device, read once per log."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from accelerate import Accelerator

from ..evaluation.evaluate import COUNTS, SUMS, RewardSums, sums_of
from ..modeling.head_spec import RewardScale
from ..packing.batch import Comparisons
from ..parallel.mesh import CHIPS, GiB
from ..runtime import Runtime
from .stopping import over_processes

_SCALE_ROWS = 512  # the reward scale is measured on at least this many of the last training rows
_CARRY = 2**30  # tokens: one int32 overflows in long log intervals, and TPUs have no int64


@dataclass(frozen=True)
class StepCounts:
    """Counts of steps since the last log."""

    taken: int = 0
    nonfinite: int = 0
    in_a_row: int = 0  # consecutive nonfinite steps up to the last step, including steps before the last log
    reached_at: int = 0  # number (from 1) of the step at which `in_a_row` reached the limit; 0 if it did not


class StepStatistics:
    """Sums over the training steps since the last log: loss, rewards, tokens, nonfinite steps and time.

    The open sums are int32 and float32 vectors on the device. Steps add to them without reading a value; a log reads
    and resets them. They are vectors because XLA would compile a scalar 0 into the program as a constant and recompile
    the step after every log.

    Steps with a nonfinite loss or gradient are counted, and their updates are skipped. Such a step still advances the
    learning rate's schedule, logs and saves. Its loss and rewards are excluded.

    Args:
        runtime: The device's runtime.
        device: The device that holds the sums.
        accelerator: Accelerator of the processes that train together; None for this process alone.
        nonfinite_limit: Maximum number of consecutive nonfinite steps: training stops when it is reached. 0 turns
            counting and skipping off.
        attribute_weights: Weights that combine several attributes into the measured reward; empty for one attribute.

    Attributes:
        rewards: `COUNTS`, `SUMS`, the lowest and the highest reward, as from `sums_of`.
        tokens_2: Number of tokens, as two digits of base `_CARRY`.
        steps_4: `StepCounts`.
        loss_sum_1: Sum of the finite steps' losses.
        flops_per_row: FLOPs of an average training row; None if unknown. Tokens that its answers share count once,
            padding does not count. See `trl_tpu.modeling.model_shape`.
        num_tokens: Tokens up to the last log, including those before a resume.
        run_tokens: Tokens of this run, with those before a resume; 0 until it ends.
        nonfinite: Nonfinite steps of this run up to the last log.
        step_loss_1: Sum of the losses of the step's micro-batches, finite only if all of them are.
        evaluated: Mean and standard deviation of rewards in the last evaluation.
    """

    flops_per_row: float | None = None
    num_tokens = 0

    def __init__(
        self,
        runtime: Runtime,
        device: torch.device,
        accelerator: Accelerator | None = None,
        nonfinite_limit: int = 0,
        attribute_weights: Sequence[float] = (),
    ) -> None:
        self._runtime, self._device, self._accelerator = runtime, device, accelerator
        self._has_scaler = accelerator is not None and accelerator.scaler is not None
        self.limit, self.attribute_weights = nonfinite_limit, attribute_weights
        self._load(RewardSums(), StepCounts())
        self._begin(0, RewardSums())

    def _to_device(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._runtime.to_device(torch.tensor(values, dtype=dtype), self._device)

    def _load(self, rewards: RewardSums, steps: StepCounts, loss: float = 0.0) -> None:
        counts = [getattr(rewards, name) for name in COUNTS], divmod(rewards.tokens, _CARRY), astuple(steps)
        counts_3, self.tokens_2, self.steps_4 = (self._to_device(each, torch.int32) for each in counts)
        sums = [getattr(rewards, name) for name in SUMS], [rewards.lowest], [rewards.highest], [loss]
        *sums_1, self.loss_sum_1 = map(self._to_device, sums)
        self.rewards = [counts_3, *sums_1]

    def _fetch(self, *more: torch.Tensor) -> tuple[RewardSums, StepCounts, float, list[torch.Tensor]]:
        """Return the rewards, the steps and the losses of this process, and ``more``, read from the device at once."""
        tensors = [self.tokens_2, self.steps_4, self.loss_sum_1, *self.rewards, *more]
        (high, low), steps_4, loss_1, *fetched = self._runtime.fetch(tensors)
        rewards = RewardSums.read(*fetched[:4])
        rewards.tokens = int(high) * _CARRY + int(low)
        return rewards, StepCounts(*steps_4.tolist()), loss_1.item(), fetched[4:]

    def read(self) -> RewardSums:
        """Return the open sums of this process's rewards."""
        return self._fetch()[0]

    def tokens_so_far(self) -> int:
        """Return the number of tokens trained on so far. All processes take part."""
        return self.num_tokens + sum(over_processes(self._accelerator, self.read().tokens))

    # ---- a run

    def start(self, step: int, parts: Sequence[Mapping[str, Any]]) -> float:
        """Begin a run, or resume it after ``step``.

        Args:
            step: The last step of the resumed checkpoint; 0 for a new run.
            parts: `state` of the run that saved the checkpoint, one entry per process. Empty for a new run.

        Returns:
            The sum of losses since the last log.
        """
        index, count = (0, 1) if (group := self._accelerator) is None else (group.process_index, group.num_processes)
        saved = [RewardSums(**part["metrics"]["open"]) for part in parts]
        self._begin(step, sum(saved, RewardSums()))
        if not parts:
            self._load(self.read(), StepCounts())
            self._earlier_tokens = self.tokens_so_far()
            return 0.0
        same_count = len(parts) == count
        sources = [parts[index]] if same_count else parts
        rewards = saved[index] if same_count else self._resumed if index == 0 else RewardSums()
        steps, loss = StepCounts(**sources[0]["nonfinite"]), sum(part["open_loss"] for part in sources) / len(sources)
        self.num_tokens, self.nonfinite = parts[0]["metrics"]["num_tokens"], -steps.nonfinite
        self._load(rewards, steps, loss)
        return loss

    def state(self) -> list[dict[str, Any]]:
        """Return the open sums of each process, to pass to `start` as ``parts``. All processes take part."""
        rewards, steps, loss, _ = self._fetch()
        metrics = {"num_tokens": self.num_tokens, "open": vars(rewards)}
        part = {"metrics": metrics, "open_loss": loss, "nonfinite": vars(steps)}
        return over_processes(self._accelerator, part)

    def _begin(self, step: int, resumed: RewardSums) -> None:
        # the next log includes these sums, but its rates do not
        self._resumed, self._step = resumed, step
        self._since = time.monotonic()
        self.run_tokens = self._earlier_tokens = 0
        self.evaluated: RewardScale | None = None
        self._windows: deque[RewardSums] = deque()  # one entry per log
        self.step_loss_1, self.nonfinite = self._to_device([0.0]), 0

    # ---- a step

    @torch.no_grad()
    def update(self, rewards_SA: torch.Tensor, tokens_S: torch.Tensor, table: Comparisons[torch.Tensor]) -> None:
        """Add the rewards of a batch.

        Args:
            rewards_SA: Rewards of each sequence (or step), per attribute.
            tokens_S: See `Batch`. Their sum is at most 2**30.
            table: The comparisons between the rewards.
        """
        if self._accelerator is None or self._runtime.counts_rows():
            add, batch = self._runtime.compiled(_add_batch), (rewards_SA.detach().float(), tokens_S, table)
            sums = self.rewards, self.tokens_2
            self.rewards, self.tokens_2 = add(*sums, *batch, self.limit > 0, self.attribute_weights)

    def means(self) -> dict[str, torch.Tensor]:
        """Return means and extremes of the open sums by metric name, as scalars on the device."""
        (_, comparisons, answers), (correct, ties, margin, reward, _), (lowest,), (highest,) = self.rewards
        means = {"accuracy": correct / comparisons, "margin": margin / comparisons, "tie_rate": ties / comparisons}
        return means | {"min_reward": lowest, "mean_reward": reward / answers, "max_reward": highest}

    @torch.no_grad()
    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch, a scalar, to the step's losses."""
        self.step_loss_1 = self.step_loss_1 + loss

    @torch.no_grad()
    def check_step(self, norm: torch.Tensor | float) -> torch.Tensor | None:
        """Count the step, and check before its update that its losses and its gradient's ``norm`` are finite.

        Returns:
            Whether the step is finite, a bool tensor [1], to skip its update otherwise. None if none is skipped here.
        """
        step_1, self.step_loss_1, finite_1 = self.step_loss_1, torch.zeros_like(self.step_loss_1), None
        if self.limit:
            # a loss scaler causes infinite gradients, and skips their updates itself
            finite_1 = torch.isfinite(step_1 if self._has_scaler else step_1 + norm)
            if self._accelerator is not None and self._accelerator.num_processes > 1:  # losses differ between them
                finite_1 = self._accelerator.reduce((~finite_1).int()) == 0
            step_1 = torch.where(finite_1, step_1, 0.0)
            self.steps_4 = _count_step(self.steps_4, finite_1, self.limit)
        self.loss_sum_1 = self.loss_sum_1 + step_1
        return None if self._has_scaler else finite_1

    def exclude(self, seconds: float) -> None:
        """Exclude time that is not training time: evaluations and saves are not, compilations are."""
        self._since += seconds

    # ---- a log

    def close(
        self, grad_norm: torch.Tensor | float | None, step: int, steps: int
    ) -> tuple[dict[str, float], float, StepCounts]:
        """Read the open sums and reset them.

        Args:
            grad_norm: Gradient norm of the last step; None after an epoch without a step.
            step: The current step.
            steps: Number of steps since the last log.

        Returns:
            Metrics to log, the sum of losses since the last log, and the counts of steps since then.
        """
        norm = grad_norm if isinstance(grad_norm, torch.Tensor) else torch.tensor(float(grad_norm or 0.0))
        own_rewards, counted, own_loss, (norm,) = self._fetch(norm)
        per_process = over_processes(self._accelerator, (own_loss, own_rewards))
        loss_sum = sum(loss for loss, _ in per_process) / len(per_process)
        rewards = sum((sums for _, sums in per_process), RewardSums())
        self._reset(counted, RewardSums())
        finite = steps - counted.nonfinite
        logs = {"loss": loss_sum / finite} if finite else {}
        if grad_norm is not None and not counted.in_a_row:
            logs["grad_norm"] = norm.item()
        self.num_tokens += rewards.tokens
        if self.num_tokens:  # a user-defined loss counts no tokens
            logs["num_tokens"] = self.num_tokens
        logs |= rewards.metrics() | self._rates(rewards, step)
        self._windows.append(rewards)
        while sum(window.pairs for window in self._windows) - self._windows[0].pairs >= _SCALE_ROWS:
            self._windows.popleft()
        if (programs := self._runtime.compile_count()) is not None:
            logs["compiled_programs"] = programs
        if (memory := self._runtime.peak_memory(self._device)) is not None:
            logs["memory_gib"] = memory / GiB
        if self.limit:
            logs["nonfinite"] = counted.nonfinite
        return logs, loss_sum, counted

    def close_steps(self) -> tuple[float, StepCounts]:
        """Return the sum of losses and the counts of steps since the last log, and reset the step counts.

        Call this after the last step, in all processes. The open sums of rewards and losses are kept.
        """
        rewards, counted, loss, _ = self._fetch()
        self._reset(counted, rewards, loss)
        self.run_tokens = self.tokens_so_far() - self._earlier_tokens
        return loss, counted

    def _reset(self, counted: StepCounts, rewards: RewardSums, loss: float = 0.0) -> None:
        """Reset the step counts, and set the open sums to ``rewards`` and ``loss``."""
        self.nonfinite += counted.nonfinite
        # after a stop at the limit, a resumed run counts consecutive nonfinite steps from 0
        self._load(rewards, StepCounts(in_a_row=0 if counted.reached_at else counted.in_a_row), loss)

    def _rates(self, sums: RewardSums, step: int) -> dict[str, float]:
        """Return throughput metrics for the steps from the last log to ``step``."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        rows, tokens, steps = sums.pairs - self._resumed.pairs, sums.tokens - self._resumed.tokens, step - self._step
        self._resumed, self._step = RewardSums(), step
        if rows <= 0 or seconds <= 0:
            return {}
        rates = {"pairs_per_second": rows / seconds, "tokens_per_second": tokens / seconds}
        if steps > 0:
            rates["seconds_per_step"] = seconds / steps
        if self.flops_per_row is not None:
            flops, chip = self.flops_per_row * rows / seconds, CHIPS.get(self._runtime.chip() or "")
            rates["model_tflops_per_second"] = flops / 1e12
            if chip is not None:
                rates["mfu"] = flops / (chip.peak_flops * self._runtime.topology().devices)
        return rates

    # ---- the scale of rewards

    @property
    def scale(self) -> RewardScale | None:
        """Mean and standard deviation of rewards in the last evaluation, or else on the last training rows."""
        return self.evaluated or scale_of(sum(self._windows, RewardSums()), "the last rows of training")


def _add_batch(
    rewards: Sequence[torch.Tensor],
    tokens_2: torch.Tensor,
    rewards_SA: torch.Tensor,
    tokens_S: torch.Tensor,
    table: Comparisons[torch.Tensor],
    finite_only: bool,
    attribute_weights: Sequence[float],
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Add the rewards of a batch to the sums of `StepStatistics`, and return the new sums."""
    (counts_3, sums_5, lowest_1, highest_1), (high, low) = rewards, tokens_2
    present_PK = table.graded_S(tokens_S).unflatten(0, (-1, table.answers))
    if finite_only:  # count a row's rewards only if all of them are finite
        are_finite_PK = torch.isfinite(rewards_SA).all(-1).view(present_PK.shape)
        present_PK = present_PK & (are_finite_PK | ~present_PK).all(-1, keepdim=True)
    earlier = counts_3[COUNTS.index("answers")], sums_5[SUMS.index("reward")]
    added = sums_of(rewards_SA, present_PK.flatten(), table, attribute_weights, *earlier)
    low = low + tokens_S.sum(dtype=torch.int32)
    carry = (low >= _CARRY).int()
    tokens_2 = torch.stack([high + carry, low - carry * _CARRY])
    extremes = torch.minimum(lowest_1, added[2]), torch.maximum(highest_1, added[3])
    return [counts_3 + added[0], sums_5 + added[1], *extremes], tokens_2


def _count_step(steps_4: torch.Tensor, finite_1: torch.Tensor, limit: int) -> torch.Tensor:
    """Return the vector of `StepCounts` after one more step."""
    failed = (~finite_1).int()
    taken, nonfinite, in_a_row, reached_at = steps_4.split(1)
    taken, nonfinite, in_a_row = taken + 1, nonfinite + failed, (in_a_row + 1) * failed
    reached_at = torch.where((reached_at == 0) & (in_a_row >= limit), taken, reached_at)
    return torch.cat([taken, nonfinite, in_a_row, reached_at])


def scale_of(sums: RewardSums, of: str) -> RewardScale | None:
    """Return the mean and standard deviation of rewards; None without rewards, or if all are equal.

    Args:
        sums: Sums over the rewards.
        of: Description of the rewarded data, for the model card.
    """
    if not sums.answers:
        return None
    mean, variance = sums.reward / sums.answers, sums.deviations / sums.answers
    return RewardScale(mean, variance**0.5, sums.answers, of) if variance > 0 and sums.lowest < sums.highest else None
