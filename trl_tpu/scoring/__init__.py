"""Rewards of many dialogues by a saved reward model: rows in, the same rows with rewards out, in order."""
