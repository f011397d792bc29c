"""Errors that say what a user can do: one line of them is all that a command prints."""


class UserError(ValueError):
    """An argument, a file or data that cannot work; the message says the rule, the values and the fix."""
