"""The version, in a module of its own: the key of a cached kernel holds it, and imports nothing from above."""

__version__ = "0.2.0"
