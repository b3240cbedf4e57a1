"""Words for what a reader has predicted, in the cell that measures it."""


def predicted(value, form: str = "{}", then: str = ", ") -> str:
    """Return words such as "predicted 3 MB, ", or "" as long as the reader has predicted nothing.

    Args:
        value: The prediction, or several in a tuple; None if there is none yet.
        form: How to write it, as for str.format, such as "{} MB".
        then: What follows.
    """
    values = value if isinstance(value, tuple) else (value,)
    return "" if None in values else f"predicted {form.format(*values)}{then}"
