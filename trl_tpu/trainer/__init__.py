"""The public API, at TRL's own module paths."""
