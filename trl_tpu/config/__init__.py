"""Settings: `RewardConfig`, and its checks before anything is loaded."""
