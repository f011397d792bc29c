"""Tests that need eight XLA devices: what is where, what devices say to each other, and several hosts.

They are virtual devices of the CPU. What says the same on one device belongs in `tests/xla`.
"""
