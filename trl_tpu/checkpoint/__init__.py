"""What a checkpoint is, how it is written, found, read, and exported."""
