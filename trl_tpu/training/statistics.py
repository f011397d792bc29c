"""Statistics of training steps: summed on the device, read once per log."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from ..config.reward_config import REWARD_METRICS
from ..data.comparisons import Comparisons
from ..evaluation.judge import COUNTS, SUMS, RewardSums, between, sums_of
from ..evaluation.verdict import Verdict
from ..modeling.outputs import RewardScale, saved_scale, set_scale
from ..parallel.mesh import GiB, peak_flops_of
from ..runtime import Runtime
from .optimizer import bare, state_on_device
from .stopping import over_processes


class Throughput:
    """Measures what training does in a second; evaluations and saves are left out, compiles are not.

    Work is what training needs by formula, see `trl_tpu.modeling.model_shape`: tokens that a pair's dialogues share
    count once, padding never.

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


@dataclass(frozen=True)
class Counted:
    """Steps since the last log, on the host."""

    taken: int
    nonfinite: int
    in_a_row: int  # how many of the last steps, those before the last log among them
    reached_at: int  # the step, the first being 1, at which `in_a_row` reached the limit; 0 if it did not


def computes_in_float16(args: Any, model: nn.Module) -> bool:
    """Return whether steps that are not finite are ordinary: a loss scale skips them, and finds its size by them."""
    return args.mixed_precision == "fp16" or any(each.dtype == torch.float16 for each in model.parameters())


class NonfiniteGuard:
    """Leaves out the update of a step whose loss or gradient is not finite, and counts such steps in a row.

    The step counts as one for everything else: the learning rate's schedule, logs, saves. The sum of the losses is as
    if it had not been. Nothing is read from the device before a log.

    Args:
        limit: How many such steps in a row are too many; 0 turns all of it off.
    """

    device_counts: torch.Tensor
    """What `close` reads, int32."""

    def __init__(self, limit: int, runtime: Runtime, device: torch.device, accelerator: Accelerator) -> None:
        self.limit = limit
        self._runtime, self._device, self._accelerator = runtime, device, accelerator
        self.start()

    @property
    def is_on(self) -> bool:
        """Whether steps are counted and skipped."""
        return self.limit > 0

    def start(self) -> None:
        """Begin a run."""
        self.total = 0  # nonfinite steps of this run up to the last log
        self._seen_1 = self._finite_1 = self._to_device(torch.ones(1, dtype=torch.bool))
        self._has_begun = False
        self._load(0, 0, 0, 0)

    def start_loss_sum(self) -> torch.Tensor:
        """Return a sum of losses to begin with, [1]: XLA would bake a scalar 0 into the next step's program."""
        self._sum_before_1, self._known_sum = (self._to_device(torch.zeros(1)) for _ in range(2))
        return self._known_sum

    def begin(self, loss_sum_1: torch.Tensor) -> None:
        """Begin a step, if none has begun. Its sum of losses is that after it, too, if it is not finite.

        `start_loss_sum` and the step before provide it; whatever else sets it, as resuming may, costs an execution.
        """
        if not self._has_begun and loss_sum_1 is not self._known_sum:
            self._sum_before_1, self._known_sum = loss_sum_1.clone(), loss_sum_1
        self._has_begun = True

    @torch.no_grad()
    def see(self, loss: torch.Tensor) -> None:
        """Note the loss, a scalar, of one of the step's micro-batches."""
        self._seen_1 = self._seen_1 & torch.isfinite(loss).all()

    @torch.no_grad()
    def end_step(self, gradient_norm: torch.Tensor | float, loss_sum_1: torch.Tensor, optimizer: Any) -> torch.Tensor:
        """Judge the step, whose update comes next, by its losses and the norm of its gradient.

        Returns:
            The sum of the losses, without this step's if it is not finite.
        """
        finite_1 = self._seen_1 & torch.isfinite(torch.as_tensor(gradient_norm, device=self._device))
        self._seen_1, self._has_begun = torch.ones_like(finite_1), False
        if self._accelerator.num_processes > 1:  # each has a loss of its own
            finite_1 = self._accelerator.reduce((~finite_1).int()) == 0
        self._count(finite_1)
        self._sum_before_1 = torch.where(finite_1, loss_sum_1, self._sum_before_1)
        self._known_sum = self._sum_before_1.clone()  # the loop adds to it in place
        self._runtime.skip_update_unless(finite_1[0], bare(optimizer))
        return self._known_sum

    def _count(self, finite_1: torch.Tensor) -> None:
        self._finite_1 = finite_1
        failed = (~finite_1[0]).int()
        taken, nonfinite, in_a_row, reached_at = self.device_counts.unbind()
        taken, nonfinite, in_a_row = taken + 1, nonfinite + failed, (in_a_row + 1) * failed
        reached_at = torch.where((reached_at == 0) & (in_a_row >= self.limit), taken, reached_at)
        self.device_counts = torch.stack([taken, nonfinite, in_a_row, reached_at])

    def skip_on_device(self, optimizer: Optimizer) -> None:
        """Skip updates of ``optimizer`` where the step is not finite, without reading whether it is.

        Old values of weights and state live only within the recorded step, so that the compiled one still updates in
        place. This needs the state beforehand: if an optimizer makes it in its first step, that step is read instead.
        What an optimizer counts on the host, as Adagrad and Adafactor do their steps, goes on counting.
        """
        if self.is_on:
            self._has_stepped = bool(optimizer.state)
            self._old: list[tuple[torch.Tensor, torch.Tensor]] = []
            optimizer.register_step_pre_hook(self._before_update)
            optimizer.register_step_post_hook(self._after_update)

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        if self._has_stepped:
            self._old = [(tensor, tensor.detach().clone()) for tensor in _tensors(optimizer)]
        elif self._runtime.fetch([self._finite_1])[0].all():
            self._has_stepped = True
        else:
            optimizer.zero_grad(set_to_none=True)  # torch's optimizers pass over parameters without a gradient

    @torch.no_grad()
    def _after_update(self, *_: object) -> None:
        finite = self._finite_1[0]
        for tensor, old in self._old:
            tensor.copy_(torch.where(finite, tensor, old))
        self._old = []

    def explain(self, first: int, last: int, rows: Sequence[int] | None, weights: str) -> str:
        """Return what to say at a stop.

        Args:
            rows: Of the training dataset, whose pairs were in step ``first``; None if unknown.
            weights: Where they are, in a few words.
        """
        named = "not known by their rows" if rows is None else f"rows {rows[:16]} of the trainer's train_dataset"
        return (
            f"The loss or the gradient of {self.limit} steps in a row, {first} to {last}, was NaN or infinite "
            f"(nonfinite_limit={self.limit}). No update was taken from them: the weights are those after step "
            f"{first - 1} ({weights}). The pairs of step {first} are {named}. Look for faults in them and in the "
            "model's own weights, or lower learning_rate; nonfinite_limit=0 trains on without these checks."
        )

    def close(self, fetched: torch.Tensor) -> Counted:
        """Read fetched `device_counts`, and count the steps up to the next log anew."""
        counted = Counted(*fetched.tolist())
        self.total += counted.nonfinite
        # after a stop a resumed run begins a row of its own
        self._load(0, 0, 0 if counted.reached_at else counted.in_a_row, 0)
        return counted

    def state_dict(self) -> dict[str, int]:
        """Return what a resumed run needs to count the same."""
        return vars(Counted(*self._runtime.fetch([self.device_counts])[0].tolist()))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._load(*vars(Counted(**state)).values())
        self.total = -state["nonfinite"]  # they were in steps before the resume

    def _load(self, *counts: int) -> None:
        self.device_counts = self._to_device(torch.tensor(counts, dtype=torch.int32))

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._runtime.to_device(tensor, self._device)


def _tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the weights, and what of their state is on their device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            yield from state_on_device(optimizer, parameter)


_SAMPLE = 512  # pairs, of which the last ones are the sample that rewards are measured on
_CARRY = 2**30  # tokens, of which a run may have more between two logs than int32 holds, and TPUs have no int64


def scale_of(sums: RewardSums, of: str) -> RewardScale | None:
    """Return the mean and the standard deviation of rewards; None where there are none, or all are alike.

    Args:
        sums: Over them.
        of: What they are rewards of, for the model card.
    """
    if not sums.answers:
        return None
    mean, variance = sums.reward / sums.answers, sums.deviations / sums.answers
    return RewardScale(mean, variance**0.5, sums.answers, of) if variance > 0 and sums.lowest < sums.highest else None


class AddedMetrics(defaultdict[str, list[float]]):
    """What a subclass adds up of its steps, by name; of names that are logged anyway it finds the last step's value.

    Args:
        read_last: Returns what is logged anyway of the last step alone, for which it stops the device.
    """

    def __init__(self, read_last: Callable[[], Mapping[str, float]]) -> None:
        super().__init__(list)
        self._read_last = read_last

    def __missing__(self, name: str) -> list[float]:
        last = self._read_last() if name in ("num_tokens", *REWARD_METRICS) else {}
        return [last[name]] if name in last else super().__missing__(name)


class RewardMetrics:
    """Adds up a training run's rewards on the device without stopping it.

    `update` only records operations, and reads nothing. The sums are vectors, since XLA would bake a scalar 0 into the
    program and compile the step anew after every log.

    Args:
        skips_nonfinite: Whether rewards that are not finite are left out, as the steps that have them are.
    """

    device_sums: list[torch.Tensor]
    """The open sums; fetched, they are what `on_host` reads."""

    def __init__(self, runtime: Runtime, device: torch.device, skips_nonfinite: bool = False) -> None:
        self._runtime, self._device, self._skips_nonfinite = runtime, device, skips_nonfinite
        self.attribute_weights: tuple[float, ...] = ()
        """Of several attributes, how their rewards make the one that is measured."""
        self.work_of_a_pair: float | None = None
        """Operations that an average pair of the training data needs, where that is known."""
        self.throughput = Throughput()
        self.num_tokens = 0  # in all batches up to the last read, over resumes
        self.evaluated: RewardScale | None = None
        """How large rewards were in the last evaluation."""
        self.verdicts: dict[str, Verdict] = {}
        """The verdict of the last evaluation, by the prefix of its metrics."""
        self._windows: deque[RewardSums] = deque()  # between two logs each
        self._load(RewardSums())

    def _load(self, sums: RewardSums) -> None:
        def to_device(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return self._runtime.to_device(torch.tensor(values, dtype=dtype), self._device)

        self.device_sums = [
            to_device([getattr(sums, name) for name in COUNTS], torch.int32),
            to_device(list(divmod(sums.tokens, _CARRY)), torch.int32),
            to_device([getattr(sums, name) for name in SUMS], torch.float32),
            to_device([sums.lowest], torch.float32),
            to_device([sums.highest], torch.float32),
        ]

    @torch.no_grad()
    def update(self, rewards_SA: torch.Tensor, tokens_S: torch.Tensor, table: Comparisons[torch.Tensor]) -> None:
        """Add the rewards of a batch, with at most 2**30 tokens."""
        if not self._runtime.counts_pairs():
            return
        add = self._runtime.compiled(_added)
        rewards_SA = rewards_SA.detach().float()
        settings = self._skips_nonfinite, self.attribute_weights
        self.device_sums = add(self.device_sums, rewards_SA, tokens_S, table, *settings)

    def start(self, step: int, parts: Sequence[Mapping[str, Any]], index: int, count: int) -> None:
        """Begin a run, or go on after ``step`` from ``parts``: the state that each process had saved.

        Args:
            index: Of this process, of which there may be another ``count`` now: then the first takes all sums.
        """
        everyone = [RewardSums(**_renamed(part["open"])) for part in parts]
        before, peak = sum(everyone, RewardSums()), peak_flops_of(self._runtime.chip())
        peak = None if peak is None else peak * self._runtime.topology().devices
        self.throughput.start(self.work_of_a_pair, peak, before, step)
        self.evaluated = None
        self._windows.clear()
        if parts:
            self.num_tokens = parts[0]["num_tokens"]
            self._load(everyone[index] if len(parts) == count else before if index == 0 else RewardSums())

    def tokens_so_far(self, fetched: Sequence[list[torch.Tensor]]) -> int:
        """Return how many tokens training has seen, those since the last log in ``fetched``, of each process."""
        return self.num_tokens + sum(on_host(sums).tokens for sums in fetched)

    def close(self, fetched: Sequence[list[torch.Tensor]], step: int) -> dict[str, float]:
        """Return what is logged of the open sums of each process, and start anew."""
        sums = sum(map(on_host, fetched), RewardSums())
        self.num_tokens += sums.tokens
        self._windows.append(sums)
        while sum(each.pairs for each in self._windows) - self._windows[0].pairs >= _SAMPLE:
            self._windows.popleft()
        self._load(RewardSums())
        counted = {"num_tokens": self.num_tokens} if self.num_tokens else {}  # a loss of the user's counts none
        return {**counted, **sums.metrics(), **self.throughput.close(sums, step)}

    @property
    def scale(self) -> RewardScale | None:
        """How large rewards were: of the last evaluation, else of the last logs that have `_SAMPLE` pairs together."""
        return self.evaluated or scale_of(sum(self._windows, RewardSums()), "the last pairs of training")

    def note_best(self, model: Any, folder: str) -> None:
        """Take the rewards' mean and deviation of the best ``model``, as saved in ``folder``, into its config."""
        self.evaluated = saved_scale(folder)
        set_scale(model.config, self.scale)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to log the same numbers: the open sums and the tokens so far."""
        return {"num_tokens": self.num_tokens, "open": vars(on_host(self._runtime.fetch(self.device_sums)))}


def _renamed(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved sums by today's names: older checkpoints knew only pairs, and squares about 0."""
    found = {"comparisons": sums["pairs"], "answers": 2 * sums["pairs"], **sums}
    if "squares" in found:
        found["deviations"] = max(found.pop("squares") - sums["reward"] ** 2 / max(found["answers"], 1), 0.0)
    return found


def _added(
    sums: list[torch.Tensor],
    rewards_SA: torch.Tensor,
    tokens_S: torch.Tensor,
    table: Comparisons[torch.Tensor],
    finite_only: bool,
    attribute_weights: Sequence[float],
) -> list[torch.Tensor]:
    """Return `RewardMetrics.device_sums` with those of a batch."""
    counts, (high, low), totals, lowest, highest = sums[0], sums[1].unbind(), *sums[2:]
    is_there_S = tokens_S > 0
    if finite_only:  # all rewards of a row, or none
        are_finite_S = torch.isfinite(rewards_SA).all(-1) | ~is_there_S
        are_finite_P1 = are_finite_S.unflatten(0, (-1, table.answers)).all(-1, keepdim=True)
        is_there_S = is_there_S & are_finite_P1.expand(-1, table.answers).flatten()
    added = sums_of(rewards_SA, is_there_S, table, attribute_weights)
    answers, reward = COUNTS.index("answers"), SUMS.index("reward")
    apart = between(counts[answers].float(), totals[reward], added[0][answers].float(), added[1][reward])
    totals = totals + added[1]
    totals = torch.cat([totals[:-1], totals[-1:] + apart])  # deviations are last
    low = low + tokens_S.sum(dtype=torch.int32)
    carry = (low >= _CARRY).int()
    tokens_2 = torch.stack([high + carry, low - carry * _CARRY])
    return [counts + added[0], tokens_2, totals, torch.minimum(lowest, added[2]), torch.maximum(highest, added[3])]


def on_host(fetched: list[torch.Tensor]) -> RewardSums:
    """Read fetched `RewardMetrics.device_sums`."""
    counts, (high, low), *others = fetched
    sums = RewardSums.read(counts, *others)
    sums.tokens = int(high) * _CARRY + int(low)
    return sums


class LogInterval:
    """Adds up on the device what the next log says, and reads it by one stop of the device.

    Args:
        metrics: Beside the loss.
        nonfinite: Leaves steps out.
    """

    def __init__(
        self,
        runtime: Runtime,
        device: torch.device,
        accelerator: Accelerator,
        metrics: RewardMetrics,
        nonfinite: NonfiniteGuard,
    ) -> None:
        self._runtime, self._device, self._accelerator = runtime, device, accelerator
        self._metrics, self._nonfinite = metrics, nonfinite

    def start(self, step: int, parts: Sequence[Mapping[str, Any]]) -> tuple[torch.Tensor, float]:
        """Begin a run, or go on after ``step`` where each of the saving processes was between two logs.

        Returns:
            The open sum of losses on the device, [1], and on the host.
        """
        index, count = self._accelerator.process_index, self._accelerator.num_processes
        self._nonfinite.start()
        self._metrics.start(step, [part["metrics"] for part in parts], index, count)
        loss_sum_1 = self._nonfinite.start_loss_sum()
        if not parts:
            return loss_sum_1, 0.0
        own = [parts[index]] if len(parts) == count else parts  # another number of processes goes on from the mean
        loss_sum = sum(part["open_loss"] for part in own) / len(own)
        self._nonfinite.load_state_dict(own[0]["nonfinite"])
        return self._runtime.to_device(torch.tensor([loss_sum]), self._device), loss_sum

    def state(self, loss_sum_1: torch.Tensor) -> list[dict[str, Any]]:
        """Return what each of accelerate's processes has added up since the last log: the parts for `start`."""
        (loss,) = self._runtime.fetch([loss_sum_1])
        own = {
            "metrics": self._metrics.state_dict(),
            "open_loss": loss.sum().item(),
            "nonfinite": self._nonfinite.state_dict(),
        }
        return over_processes(self._accelerator, own)

    def close(
        self,
        loss_sum_1: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        learning_rate: float,
        step: int,
        steps: int,
    ) -> tuple[dict[str, float], float, Counted]:
        """Read what was added up since the last log, ``steps`` before ``step``, and start anew.

        Args:
            grad_norm: Of the last step; None after an epoch without a step.

        Returns:
            What is logged, the sum of the interval's losses, and its steps.
        """
        norm = grad_norm if isinstance(grad_norm, torch.Tensor) else torch.tensor(float(grad_norm or 0.0))
        own = [loss_sum_1, norm, self._nonfinite.device_counts, *self._metrics.device_sums]
        loss, norm, counts, *sums = self._runtime.fetch(own)
        everyone = over_processes(self._accelerator, (loss.item(), sums))
        loss_sum = sum(loss for loss, _ in everyone) / len(everyone)
        counted = self._nonfinite.close(counts)
        finite = steps - counted.nonfinite
        logs = {"loss": loss_sum / finite} if finite else {}
        if grad_norm is not None and not counted.in_a_row:
            logs["grad_norm"] = norm.item()
        logs["learning_rate"] = learning_rate
        logs |= self._metrics.close([sums for _, sums in everyone], step)
        if (programs := self._runtime.compile_count()) is not None:
            logs["compiled_programs"] = programs
        if (memory := self._runtime.most_memory(self._device)) is not None:
            logs["memory_gib"] = memory / GiB
        if self._nonfinite.is_on:
            logs["nonfinite"] = counted.nonfinite
        return logs, loss_sum, counted
