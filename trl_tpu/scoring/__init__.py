"""Score rows with a saved reward model: return the same rows with rewards, in order."""
