"""Errors a user can act on: each is one paragraph with what was expected, what was found and what to do."""


class QuantsieveError(Exception):
    """Base of all errors that the command line turns into one paragraph and an exit code."""

    exit_code = 1

    def __init__(self, expected: str, found: str, todo: str):
        super().__init__(f"Expected {expected}, found {found}. {todo}")


class InputError(QuantsieveError):
    """The data, an option's value or a file that the user named cannot be used."""


class UnsupportedModel(QuantsieveError):
    """The model is not ONNX, is broken, or asks for what Quantsieve cannot do."""


class RunFolderError(QuantsieveError):
    """The run folder cannot be used: locked, made for other settings, not writable, disk full."""


class ShapeMismatch(QuantsieveError):
    """Two arrays that must have one shape have two."""


class UsageError(QuantsieveError):
    """The command or the call itself is wrong: unknown names, options that exclude each other."""

    exit_code = 2
