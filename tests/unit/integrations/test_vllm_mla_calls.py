"""What the backend of vLLM calls for latent attention, without vLLM, on the CPU; tests/gpu/test_vllm_mla_gpu.py too."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from omniattn.errors import ArgumentError, DtypeError, ShapeError  # noqa: E402
from omniattn.integrations.latent_limits import MOST_QUERIES, most_queries  # noqa: E402
from omniattn.integrations.vllm import latent_calls  # noqa: E402
from tests.vllm_mla_steps import Steps  # noqa: E402

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_ds_mla"])
def test_steps(name: str) -> None:
    run = Steps(name, heads=2, device="cpu", block=16)
    run.prepare(("a", 40), ("b", 5))
    run.check(run.prompts(), prompts=True)
    run.prepare(("b", 20), ("c", 7), ("a", 3))
    run.check(run.prompts(), prompts=True)
    run.prepare(("a", 1), ("c", 3))
    o, lse = run.decode(3, return_lse=True)
    run.check(run.up(o))
    assert not o[4:].any()
    assert lse.shape == (16, 2)
    run.prepare(("a", 1), ("d", 3), ("b", 1))
    lists, places, counts = run.choose(16)
    run.check(run.up(run.sparse(places, counts)), lists=lists)


def test_caches_of_another_shape() -> None:
    for name, width, dtype in (("auto", 512, torch.bfloat16), ("fp8_ds_mla", 576, torch.uint8)):
        with pytest.raises(ShapeError, match=r"kv_cache.*\(blocks, block_size, "):
            latent_calls.latent_pool(torch.zeros(2, 16, width, dtype=dtype), name, None)


def test_caches_of_other_elements_and_formats() -> None:
    for name, width in (("fp8", 576), ("fp8_e4m3", 576), ("fp8_ds_mla", 656)):
        with pytest.raises(DtypeError, match=rf"'kv_cache'.*one byte with kv_cache_dtype '{name}'"):
            latent_calls.latent_pool(torch.zeros(2, 16, width, dtype=torch.bfloat16), name, None)
    for unknown in ("foo", None, "int8_per_token_head"):
        with pytest.raises(ArgumentError, match="'kv_cache_dtype': expected one of auto"):
            latent_calls.latent_pool(torch.zeros(2, 16, 576, dtype=torch.bfloat16), unknown, None)  # type: ignore[arg-type]


def test_how_many_queries_a_call_takes() -> None:
    assert most_queries(128, deterministic=False, in_8_bits=True) == MOST_QUERIES
    run = Steps(heads=2, device="cpu", block=16, deterministic=True)
    run.prepare(("a", 20))
    most = most_queries(2, deterministic=True, in_8_bits=False)
    run.prepare(("a", most))
    run.check(run.up(run.decode(most)))


def test_importing_it_imports_no_vllm() -> None:
    code = "import sys, omniattn.integrations.vllm.latent_calls; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
