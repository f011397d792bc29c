"""What TRL had under `trl.experimental`, at its module paths."""
