"""The batch, and token pairs in rows that hold every shared prefix once. No runtime, no model."""
