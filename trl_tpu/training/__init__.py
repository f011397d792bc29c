"""The training step around the model: optimizer state, step boundaries, metrics, saving."""
