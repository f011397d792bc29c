"""Evaluate rewards: accuracy with intervals, calibration, length bias and best of N."""
