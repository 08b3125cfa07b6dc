"""``index_logits`` and ``top_k`` under torch.compile, without memory, and under JAX's transforms, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.errors import ArgumentError, UnsupportedError  # noqa: E402
from tests.indexer_cases import (  # noqa: E402
    E4M3,
    LogitsCall,
    paged_call,
    ranged_call,
    same_logits,
    wanted_positions,
)

pytestmark = pytest.mark.frameworks


def _torch(call: LogitsCall) -> dict[str, Any]:
    def tensor(x: Any) -> Any:
        return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) if x.dtype == E4M3 else torch.from_numpy(x)

    return {name: tensor(x) for name, x in call.arguments.items()}


def test_torch() -> None:
    call = paged_call(64, 2, 16, True)
    same_logits(oa.index_logits(**_torch(call)).numpy(), call)


def test_compiled() -> None:
    call = paged_call(64, 2, 16, False)

    def both(arrays: Any) -> Any:
        logits = oa.index_logits(**arrays)
        return logits, oa.top_k(logits, 20, lengths=arrays["seq_lens"], next_n=2)

    logits, chosen = torch.compile(both, fullgraph=True, backend="aot_eager")(_torch(call))
    same_logits(logits.numpy(), call)
    np.testing.assert_array_equal(chosen.numpy(), wanted_positions(logits.numpy(), 20))


@pytest.mark.parametrize("paged", [True, False])
def test_without_memory(paged: bool) -> None:
    from torch._subclasses import FakeTensorMode

    given = _torch(paged_call(8, 2, 16, True) if paged else ranged_call(8, 4, 50))
    real = oa.index_logits(**given)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in given.items()}
        made = oa.index_logits(**fake)
        assert (made.shape, made.dtype) == (real.shape, real.dtype)
        chosen = oa.top_k(made, 7)
        assert (chosen.shape, str(chosen.dtype)) == ((len(real), 7), "torch.int32")


def test_opcheck() -> None:
    import omniattn.frameworks.torch.tracing  # noqa: F401

    ops, given = torch.ops.omniattn, _torch(ranged_call(8, 4, 50))
    arrays = (given["q"], given["k"], given["weights"], given["k_scale"], None, None, None)
    # The check of the schema multiplies inputs, which torch does not for e4m3.
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (*arrays, given["k_start"], given["k_end"])
    torch.library.opcheck(ops.index_logits.default, arguments, test_utils=utilities)
    torch.library.opcheck(ops.top_k.default, (torch.randn(3, 9), 4, None, None, 1, None, None))


def test_what_no_operator_has() -> None:
    x = torch.randn(3, 9)
    with pytest.raises(UnsupportedError, match="requires a gradient"):
        oa.top_k(x.clone().requires_grad_(), 2)
    with pytest.raises(ArgumentError, match="'out': expected None in a traced"):
        torch.vmap(lambda y: oa.top_k(y, 2, out=torch.zeros(1, 2, dtype=torch.int32)))(x[:, None])
    with pytest.raises(UnsupportedError, match="'lengths' is a list"):
        torch.vmap(lambda y: oa.top_k(y, 2, lengths=[3]))(x[:, None])


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    call = paged_call(64, 2, 16, True)
    given = {name: jax.numpy.asarray(x) for name, x in call.arguments.items()}
    logits = oa.index_logits(**given)
    same_logits(np.asarray(logits), call)
    chosen = jax.jit(lambda arrays: oa.top_k(oa.index_logits(**arrays), 20))(given)
    np.testing.assert_array_equal(np.asarray(chosen), wanted_positions(np.asarray(logits), 20))
    mapped = jax.vmap(lambda x: oa.top_k(x, 20))(logits.reshape(5, 2, -1))
    np.testing.assert_array_equal(np.asarray(mapped).reshape(10, 20), np.asarray(chosen))
    with pytest.raises(UnsupportedError, match="no derivative"):
        jax.grad(lambda w: oa.index_logits(**given | {"weights": w})[0, 0])(given["weights"])
