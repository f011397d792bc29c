"""Write, find, verify, read and export checkpoints."""
