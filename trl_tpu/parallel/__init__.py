"""Sharding of a model and its batches over devices: mesh shapes, sharding plans, and their application."""
