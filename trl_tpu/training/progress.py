"""What a user watches while it trains: a bar on a terminal, and a line a log wherever it goes."""

import sys
import time
from collections.abc import Iterator
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, Trainer, TrainerControl, TrainerState, TrainingArguments

from ..config.metric_names import LENGTH_METRICS, METRICS

_SHOWN = ("loss", "accuracy")
_LEFT_TO_TRACKERS = {
    *("epoch", "grad_norm", "learning_rate", "total_flos", "num_input_tokens_seen", "tokens_per_second", "mfu"),
    *("seconds_per_step", "model_tflops_per_second", "compiled_programs", "memory_gib", *METRICS, *LENGTH_METRICS),
}


class Progress(ProgressCallback):
    """transformers' bar, with loss, accuracy and pairs a second beside the time left, and short lines of logs.

    Where there is no terminal to draw on, only the lines, with the time left in each. A notebook keeps transformers'.
    """

    def __init__(self) -> None:
        super().__init__()
        self._draws = False
        self._state: TrainerState | None = None  # while it trains
        self._began = (0, 0.0)  # at which step, and when

    # ---- what is going on

    def say(self, what: str) -> None:
        """Tell what training waits for, such as "compiling shape 2 of 4"; of "", that it goes on."""
        if self._state is None:
            return
        if self.training_bar is not None:
            self.training_bar.set_description_str(what)
        elif what:
            self._write(f"step {self._state.global_step}/{self._state.max_steps}: {what} ...")

    def _write(self, line: str) -> None:
        if self.training_bar is not None:
            self.training_bar.write(line)
        else:
            print(line, flush=True)

    # ---- transformers' events

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._draws, self._state = sys.stderr.isatty(), state
        self._began, self.current_step = (state.global_step, time.monotonic()), state.global_step
        if self._draws:
            # from the step of a resume on, or the time left would be too short
            self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **more)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **_: Any,
    ) -> None:
        if sys.stderr.isatty():
            super().on_prediction_step(args, state, control, eval_dataloader)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if self._state is None:
            return
        text = ", ".join(_parts(logs))
        if "loss" in logs and self.training_bar is not None:
            self.training_bar.set_postfix_str(text)
        left = "" if self.training_bar is not None or "train_loss" in logs else self._time_left()
        self._write(f"step {state.global_step}/{state.max_steps}: {text}{left}")

    def _time_left(self) -> str:
        """Tell the time left, at the pace of this run so far."""
        assert self._state is not None
        first, when = self._began
        done, left = self._state.global_step - first, self._state.max_steps - self._state.global_step
        if done <= 0 or left <= 0:
            return ""
        return f", {tqdm.format_interval((time.monotonic() - when) / done * left)} left"

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **more)
        self._state = None


def _parts(logs: dict[str, Any]) -> Iterator[str]:
    """Yield what a person reads of a log: of training, of an evaluation, or of the end; and whatever is not ours."""
    if "train_loss" in logs:
        yield f"trained in {tqdm.format_interval(logs.get('train_runtime', 0))}, loss {_number(logs['train_loss'])}"
        return
    kind = next((key.removesuffix("loss") for key in logs if key.endswith("_loss")), "")
    own = {key.removeprefix(kind): value for key, value in logs.items()}
    if kind:
        yield kind.removesuffix("_").removeprefix("eval_").replace("eval", "evaluation")
    yield from (f"{key} {_number(own[key])}" for key in _SHOWN if key in own)
    if "pairs_per_second" in own:
        yield f"{_number(own['pairs_per_second'])} pairs/s"
    if own.get("nonfinite"):
        yield f"nonfinite {own['nonfinite']}"
    known = {*_SHOWN, "pairs_per_second", "nonfinite", *_LEFT_TO_TRACKERS}
    others = {key: value for key, value in own.items() if key not in known and not key.startswith("accuracy/")}
    yield from (f"{key} {_number(value)}" for key, value in others.items())


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:100]


def use_own_progress(trainer: Trainer) -> None:
    """Put ours in the place of the bar that transformers has just added, if it has: a notebook's is another one."""
    callbacks = trainer.callback_handler.callbacks
    if type(callbacks[-1]) is ProgressCallback:
        callbacks[-1] = Progress()


def say(trainer: Trainer, what: str) -> None:
    """Tell the user what training waits for, see `Progress.say`; unless progress is shown in another way."""
    for each in trainer.callback_handler.callbacks:
        table = getattr(each, "training_tracker", None)  # of transformers' callback for notebooks
        if isinstance(each, Progress):
            each.say(what)
        elif table is not None:
            table.prefix = what
            table.update(table.value or trainer.state.global_step, force_update=True)
