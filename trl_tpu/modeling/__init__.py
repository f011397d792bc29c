"""The model: loading, attention over packed rows, rewards, losses, adapters."""
