"""Values in error messages."""


def quoted(value: object) -> str:
    """Return the representation of a value without double quotes, because clients put messages into JSON.

    Args:
        value: what the user passed.
    """
    return repr(value).replace('"', "'")
