"""Preference data, from raw rows to batches: formats, checks, tokenization, collators. No torch_xla, no trainer."""
