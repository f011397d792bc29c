"""Compatibility with earlier versions of transformers and TRL, and with EasyDeL."""
