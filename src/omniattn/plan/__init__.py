"""From a call to launches: one cache of plans, the fast path of repeated calls, execution.

The same for every operation: `engine.run` takes a `Call`, which an operation's `Operation` describes.
"""
