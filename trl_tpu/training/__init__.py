"""Training around the model: optimizer state, step boundaries, metrics, stopping and saving."""
