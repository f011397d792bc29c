"""Settings: `RewardConfig`, and what checks it before anything is loaded."""
