"""Attention and products as operations: in plain torch, and by kernels of an accelerator."""
