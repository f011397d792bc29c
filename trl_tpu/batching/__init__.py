"""How batches look: packed or padded, and in which shapes."""
