"""The one error that bad input raises."""


class InputError(ValueError):
    """Input that a person gave is wrong.

    The message is one line: what is wrong, where (file, array, row), which value, and what would be right.
    Command lines print it after ``error:`` and exit with status 2.
    """
