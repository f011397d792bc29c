"""How batches attend: by masks, tree by tree, in expanded rows; and for which models packed rows are exact."""
