"""The verdict: numbers on what a reward model's rewards say about it."""
