"""Train a small transformer in JAX to repeat what it has read, with omniattn and with XLA's attention.

python examples/train_jax/train.py              # first GPU
python examples/train_jax/train.py --small      # CPU, a tiny model in float32, seconds
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import model
from jax import numpy as jnp


@dataclass(frozen=True)
class Run:
    """A training.

    Attributes
    ----------
    attention : str
    losses : list of float
        Nats a token, of each step.
    tokens_per_second : float
        Without the first step, which compiles.
    """

    attention: str
    losses: list[float]
    tokens_per_second: float


def batch(config: model.Config, size: int, key: jax.Array) -> jax.Array:
    """Sequences whose second half repeats the first."""
    half = jax.random.randint(key, (size, config.context // 2), 0, config.vocabulary)
    return jnp.concatenate([half, half], axis=1)


def train(config: model.Config, attention: str, steps: int, size: int, rate: float) -> Run:
    """Train from one seed."""
    step = jax.jit(functools.partial(model.step, config, model.ATTENTIONS[attention], rate), donate_argnums=0)
    keys = jax.random.split(jax.random.key(0), steps + 1)
    weights = model.initial(config, keys[0])
    state = (weights, jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights), jnp.zeros(()))
    losses, begin = [], time.perf_counter()
    for i in range(steps):
        state, value = step(state, batch(config, size, keys[i + 1]))
        if i == 0:
            value.block_until_ready()
            begin = time.perf_counter()
        losses.append(value)
    found = [float(x) for x in losses]
    seconds = time.perf_counter() - begin
    return Run(attention, found, (steps - 1) * size * config.context / seconds)


def main(arguments: Sequence[str] | None = None) -> list[Run]:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a tiny model in float32, on the CPU")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning (default: %(default)s)")
    parser.add_argument(
        "--attention", nargs="+", choices=tuple(model.ATTENTIONS), default=["omniattn", "xla"], metavar="NAME",
        help=f"one training for each of {', '.join(model.ATTENTIONS)} (default: omniattn xla)",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    if given.steps < 2:
        parser.error(f"--steps: expected 2 or more, received {given.steps}")
    config = model.Config()
    if given.small:
        config = replace(config, layers=2, heads=4, kv_heads=2, head_dim=16, context=16, vocabulary=16, dtype="float32")
    with jax.default_device(jax.devices("cpu" if given.small else None)[0]):
        runs = [train(config, name, given.steps, given.batch, given.rate) for name in given.attention]
    for run in runs:
        print(
            f"{run.attention:9} loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, {run.tokens_per_second:,.0f} tokens/s"
        )
    for run in runs[1:]:
        apart = max(abs(a - b) for a, b in zip(runs[0].losses, run.losses, strict=True))
        print(f"losses of {runs[0].attention} and {run.attention} differ by {apart:.4f} at most")
    return runs


if __name__ == "__main__":
    main()
