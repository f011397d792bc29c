"""Tables, pictures, the report page and the model card: everything that people read about a model's rewards."""
