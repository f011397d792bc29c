"""Tests that need eight XLA devices: shardings, collectives, and several hosts.

The devices are virtual ones of the CPU. Tests that also work on one device belong in `tests/xla`.
"""
