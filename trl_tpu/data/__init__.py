"""From preference rows to batches: formats, checks, tokenising, packing, collators. No torch_xla, no trainer."""
