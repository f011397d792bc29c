"""The main jobs, one a file, and what their command lines share."""
