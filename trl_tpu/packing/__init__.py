"""Batches, and rows of tokens that store every shared prefix once. Imports no runtime and no model."""
