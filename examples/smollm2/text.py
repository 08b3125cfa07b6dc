"""The text of the example: the language reference that CPython carries for `help()`. No download, plain English."""

from __future__ import annotations

import hashlib
import platform


def load_text() -> str:
    """All topics of `pydoc_data.topics` in alphabetical order; Python versions differ a little in them."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def describe_text(text: str) -> str:
    """Name of the text with the Python version and a digest, to be printed beside results."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"pydoc_data.topics of Python {platform.python_version()}, sha256 {digest}..."
