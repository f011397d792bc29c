"""Tables, pictures, the page and the model card: everything a person reads about a model's rewards."""
