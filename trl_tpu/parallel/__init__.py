"""How a model and a batch are laid out over devices: the mesh's arithmetic, the plan as data, and its application."""
