"""What a reward model's rewards say about it, in numbers: the verdict."""
