"""Sizes as people read them."""


def megabytes(size: float) -> str:
    """A size in bytes: `98.4 MB`, `1.25 GB`."""
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.2f} GB"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
