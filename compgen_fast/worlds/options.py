"""What a world takes besides its name and split, as text: name=value, from command lines and settings."""

import json
from collections.abc import Sequence
from typing import Any


def named(options: Sequence[str]) -> dict[str, Any]:
    """name=value pairs; values that read as JSON (2, true) are what they read as, others are text."""
    found: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise ValueError(f"--options {option}: expected name=value, such as objects=2")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
