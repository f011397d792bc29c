"""From preference rows to batches: formats, checks, tokenizing, packing, collators. No torch_xla, no trainer."""
