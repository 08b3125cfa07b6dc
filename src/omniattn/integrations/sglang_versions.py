"""Versions of SGLang, and the error for others."""

from __future__ import annotations

from importlib import metadata

from ..errors import UnsupportedError

__all__ = ["TESTED", "unknown_version", "version"]

#: Versions that the tests of the backend ran with.
TESTED = ("0.5.21", "0.5.22", "0.5.23")


def version() -> str:
    """The one that is installed."""
    return metadata.version("sglang")


def unknown_version(missing: str) -> UnsupportedError:
    """The error for an interface that has moved."""
    return UnsupportedError(
        f"sglang {version()}: its attention backends lack what omniattn looked for: {missing}",
        instead=f"sglang {', '.join(TESTED)}, with which this was tested, or another --attention-backend",
    )
