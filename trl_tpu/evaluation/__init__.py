"""What a reward model's rewards say about it: a verdict in numbers, tables, pictures, and a page of all of them."""
