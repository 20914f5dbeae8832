"""What to say instead of a name that there is not."""

from collections.abc import Iterable
from difflib import get_close_matches


def instead_of(name: str, known: Iterable[str]) -> str:
    """The names that it may have been meant for, or else all that are known."""
    names = list(known)
    close = get_close_matches(name, names)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"expected one of {', '.join(names)}" if len(names) > 1 else f"expected {names[0]}"
