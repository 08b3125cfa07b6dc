"""Calls under JAX's transformations: primitives, their rules and lowerings. `omniattn.ops` comes here with tracers."""
