"""Shared settings of all tests."""

from hypothesis import settings

# Two busy cores: an example's time says nothing.
settings.register_profile("trl_tpu", deadline=None)
settings.load_profile("trl_tpu")
