"""PRMConfig: the settings of a `PRMTrainer`."""

from dataclasses import dataclass

from ...config.checks import check_limits
from ...config.reward_config import RewardConfig, help_from_docstring

_OF_PAIRS = "center_rewards_coefficient margin_scale label_smoothing label_smoothing_factor eval_by truncation_mode"
_OF_RANKINGS = "loss_type=plackett_luce|regression average_over=comparisons ties attributes step_separator=^None$"


@help_from_docstring
@dataclass
class PRMConfig(RewardConfig):
    r"""Settings of a [`PRMTrainer`]: those of TRL's config of that name, and a [`RewardConfig`]'s.

    Parameters:
        learning_rate (`float`, *optional*, defaults to `1e-5`):
            The initial learning rate for AdamW.
        max_length (`int`, *optional*, defaults to `1024`):
            Solutions are cut after this many tokens, prompt included. `None` cuts nothing.
        max_completion_length (`int`, *optional*):
            The steps of a solution are cut after this many tokens, all together.
        step_separator (`str`, *optional*, defaults to `"\n"`):
            What follows each step; at its last token the step is judged.
        train_on_last_step_only (`bool`, *optional*, defaults to `False`):
            Whether only the last label of each solution is trained on. Evaluation takes all.

    Raises:
        UserError: For settings of pairs, whose texts are left out or cut at either end.
    """

    learning_rate: float = 1e-5
    max_completion_length: int | None = None
    step_separator: str = "\n"  # type: ignore[misc]  # None where dialogues are judged
    train_on_last_step_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        refused = dict.fromkeys([*_OF_PAIRS.split(), *_OF_RANKINGS.split()], "leave it out")
        check_limits(self, refused, "not for process rewards")
