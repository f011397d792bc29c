"""What a user watches while it trains."""

from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

from ..config.metric_names import LENGTH_METRICS, METRICS

_SHOWN = ("loss", "accuracy", "num_tokens")
_FOR_TRACKERS = {
    *("grad_norm", "learning_rate", "num_input_tokens_seen", "tokens_per_second", "seconds_per_step", "mfu"),
    *("model_tflops_per_second", "compiled_programs", "memory_gib", *METRICS, *LENGTH_METRICS),
} - {*_SHOWN}


class Progress(ProgressCallback):
    """transformers' bar, which also says what is being compiled; its lines leave out what is for trackers."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            # from the step of a resume on, or the time left would be too short
            self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True)
        self.current_step = state.global_step

    def say(self, what: str) -> None:
        """Tell what training waits for, such as "compiling shape 2 of 4"; of "", that it goes on."""
        if self.training_bar is not None:
            self.training_bar.set_description_str(what)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **more: Any
    ) -> None:
        shown = {
            name: value
            for name, value in (logs or {}).items()
            if name.removeprefix("eval_") not in _FOR_TRACKERS and "accuracy/" not in name
        }
        super().on_log(args, state, control, logs=shown, **more)
