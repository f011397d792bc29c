"""What an evaluation measures by itself, by name without its prefix."""

REWARD_METRICS = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin", "tie_rate")
#: Of a verdict; the second ones where pairs have lengths of both kinds.
VERDICT_METRICS = ("accuracy_low", "accuracy_high", "ece", "brier")
LENGTH_METRICS = ("length_only_accuracy", "length_controlled_accuracy")
#: Of which less is better.
ERRORS = ("ece", "brier")
#: Of every evaluation; the last three are transformers'.
METRICS = (
    *("loss", "num_tokens", *REWARD_METRICS, *VERDICT_METRICS),
    *("runtime", "samples_per_second", "steps_per_second"),
)
