"""Compatibility with TRL up to 0.23, EasyDeL and transformers 4. Scripts with current names do not need it."""
