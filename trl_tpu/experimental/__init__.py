"""Trainers from `trl.experimental`, at TRL's module paths."""
