"""The logger ``omniattn``: silent, unless OMNIATTN_LOG or the application says otherwise."""

from __future__ import annotations

import logging

from . import env

_LOGGER = logging.getLogger("omniattn")
_LOGGER.addHandler(logging.NullHandler())
_configured: list[logging.Handler] = []
_seen_once: set[str] = set()


def get() -> logging.Logger:
    """The logger, with OMNIATTN_LOG applied on the first call (not at import, which must never fail)."""
    if not _configured:
        level = env.get("OMNIATTN_LOG")
        handler: logging.Handler = logging.NullHandler()
        if level is not None:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("omniattn: %(levelname)s: %(message)s"))
            _LOGGER.setLevel(level.upper())
            # The application's root handlers would print every line a second time.
            _LOGGER.propagate = False
        _LOGGER.addHandler(handler)
        _configured.append(handler)
    return _LOGGER


def warn_once(message: str) -> None:
    """Log ``message`` as a warning the first time that it comes up in this process."""
    if message not in _seen_once:
        _seen_once.add(message)
        get().warning("%s", message)


def reset() -> None:
    """Forget the configuration, so that the next `get` reads OMNIATTN_LOG again."""
    for handler in _configured:
        _LOGGER.removeHandler(handler)
    _configured.clear()
    _seen_once.clear()
    _LOGGER.propagate = True
    _LOGGER.setLevel(logging.NOTSET)
