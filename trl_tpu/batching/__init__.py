"""How batches look: packed or padded, in which shapes, and which of them each host reads."""
