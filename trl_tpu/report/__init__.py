"""What a person reads of a model's rewards: tables, pictures, the page, the model card."""
