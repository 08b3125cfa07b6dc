"""SGLang's own classes call the backend on the CPU, against a plain reference in float64."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import omniattn as oa
from omniattn.errors import UnsupportedError

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
pytest.importorskip("transformers")

from sglang.srt import plugins  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.layers.attention import attention_registry  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.server_args import DETERMINISTIC_ATTENTION_BACKEND_CHOICES, ServerArgs  # noqa: E402

from omniattn.integrations import sglang as integration  # noqa: E402
from omniattn.integrations import sglang_backend  # noqa: E402
from tests.unit.integrations.sglang_server import DIM, HEADS, SCALE, STEPS, Server, check_steps, configuration, guess  # noqa: E402

E4M3 = torch.float8_e4m3fn

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _configuration() -> Iterator[None]:
    with configuration():
        yield


# Found, chosen, built.


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry points of pyproject.toml, as pip installs them."""
    import tomllib  # Python 3.11, as SGLang's wheels

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = tmp_path / "omniattn_entry_points-0.dist-info"
    folder.mkdir()
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: omniattn-entry-points\nVersion: 0\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("_installed")
def test_the_plugin_is_found_and_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.delitem(attention_registry.ATTENTION_BACKENDS, "omniattn")
    plugins.load_plugins()
    assert attention_registry.ATTENTION_BACKENDS["omniattn"] is integration._create
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for option in ("attention", "prefill-attention", "decode-attention"):
        chosen = parser.parse_args(["--model-path", "x", f"--{option}-backend", "omniattn"])
        assert getattr(chosen, option.replace("-", "_") + "_backend") == "omniattn"


def test_deterministic_inference_may_choose_it() -> None:
    integration.register()
    assert DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count("omniattn") == 1


def test_sglang_builds_it() -> None:
    server = Server()
    assert type(server.backend) is sglang_backend.OmniattnBackend
    assert server.backend.prefill_attention_backend_str == "omniattn"
    assert not server.backend.needs_cpu_seq_lens
    assert not server.backend.deterministic


def test_importing_omniattn_imports_no_sglang() -> None:
    code = "import sys, omniattn.integrations.token_slots; print('sglang' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# The steps of a server.


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_steps(page_size: int, order: str) -> None:
    with envs.SGLANG_USE_HND_KVCACHE.override(order == "hnd"):
        server = Server(page_size)
    assert server.pool.kv_cache_layout == order
    check_steps(server)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tables_are_as_wide_as_they_have_to_be(page_size: int) -> None:
    server = Server(page_size)
    for new, tokens in ((70, 70), (70, 140), (1, 141), (110, 251)):  # one request of several chunks
        got, step = server.run({1: new})
        server.check(got, step)
        pages = -(-tokens // page_size)
        columns = server.backend.forward_metadata.table.shape[1]
        assert pages <= columns <= min(2 * pages - 1, server.backend.tables.columns)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [0, 5, 31])
def test_windows(page_size: int, window: int) -> None:
    # 0 is no window for SGLang's layers.
    check_steps(Server(page_size, layer={"sliding_window_size": window}), left=window or -1)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_windows_with_a_pool_of_their_own(page_size: int) -> None:
    server = Server(page_size, layer={"sliding_window_size": 20}, window_pool=True)
    for mode, new in STEPS:
        step = server.requests.step(new)
        batch = server.batch(step, mode)
        server.backend.init_forward_metadata(batch)
        for layer in (0, 1):  # that of windows, and the other one
            server.check(server.call(step, batch, layer), step, left=20)
    slots = server.slots.req_to_token[3, :5].long()
    there = server.pool.full_to_swa_index_mapping[slots]
    assert not torch.equal(there, slots)
    k = server.pool.swa_kv_pool.k_buffer[0][there].double()
    assert torch.equal(k, server.requests._kept[3][0][:5])


def test_softcap() -> None:
    check_steps(Server(layer={"logit_cap": 1.5}), softcap=1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks(dtype: Any) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=dtype)
    check_steps(Server(), kwargs={"sinks": sinks}, sinks=sinks)


def test_all_options_at_once() -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    server = Server(64, layer={"logit_cap": 2.0, "sliding_window_size": 17}, scales=(0.5, 0.25), cache_dtype=E4M3)
    check_steps(server, kwargs={"sinks": sinks}, sinks=sinks, softcap=2.0, left=17)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("scales", [None, (0.5, 0.125)])
def test_e4m3(page_size: int, scales: Any) -> None:
    check_steps(Server(page_size, scales=scales, cache_dtype=E4M3))


def test_scales_that_change_are_seen() -> None:
    server = Server(scales=(0.5, 0.25), cache_dtype=E4M3)
    server.run({1: 20})
    for x in server.layers:  # as for weights that are loaded anew
        x.k_scale.data.fill_(1.0)
        x.v_scale.data.fill_(0.5)
    server.requests.scales = (1.0, 0.5)
    got, step = server.run({2: 20})
    server.check(got, step)
    for x in server.layers:  # other tensors
        x.k_scale, x.v_scale = (torch.nn.Parameter(torch.tensor(s), requires_grad=False) for s in (0.25, 2.0))
    server.requests.scales = (0.25, 2.0)
    got, step = server.run({3: 20})
    server.check(got, step)


def test_scales_that_are_not_float32_are_read_at_each_call() -> None:
    server = Server(scales=(0.5, 0.25), cache_dtype=E4M3)
    for x in server.layers:
        x.k_scale, x.v_scale = (
            torch.nn.Parameter(torch.tensor(s, dtype=torch.bfloat16), requires_grad=False) for s in (0.5, 0.25)
        )
    server.run({1: 20})
    for x in server.layers:
        x.k_scale.data.fill_(1.0)
        x.v_scale.data.fill_(0.5)
    server.requests.scales = (1.0, 0.5)
    got, step = server.run({2: 20})
    server.check(got, step)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype: Any) -> None:
    check_steps(Server(dtype=dtype, cache_dtype=dtype), atol=3e-3 if dtype == torch.float16 else 2e-2)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_lse(mode: Any) -> None:
    server = Server()
    server.run({1: 20, 2: 5})
    (o, lse), step = server.run({1: 1, 2: 1}, mode, return_lse=True)
    server.check(o, step)
    _, want = server.requests.expected(step, scale=SCALE)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    torch.testing.assert_close(lse.double(), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", [AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL])
@pytest.mark.parametrize("window", [-1, 6])
def test_bidirectional_prompts(kind: Any, window: int) -> None:
    server = Server(layer={"attn_type": kind, "sliding_window_size": window})
    got, step = server.run({1: 30, 2: 17})
    server.check(got, step, left=window, right=window)
    if kind is AttentionType.DECODER_BIDIRECTIONAL:
        got, step = server.run({1: 1}, ForwardMode.DECODE)
        server.check(got, step, left=window)
    with pytest.raises(UnsupportedError, match="have not seen the new ones"):
        server.run({2: 4})


def test_keys_that_are_there_already() -> None:
    """A layer that shares another one's cache brings no keys; with save_kv_cache=False they were written before."""
    server = Server()
    step = server.requests.step({1: 20})
    batch = server.batch(step)
    server.backend.init_forward_metadata(batch)
    server.call(step, batch)
    before = [x.clone() for x in server.pool.get_kv_buffer(0)]
    with forward_context(ForwardContext(attn_backend=server.backend)):
        got = server.layers[0](step.q, None, None, batch)
    server.check(got, step)
    nans = torch.full_like(step.k, float("nan"))
    with forward_context(ForwardContext(attn_backend=server.backend)):
        got = server.layers[0](step.q, nans, nans, batch, save_kv_cache=False)
    server.check(got, step)
    assert all(torch.equal(x, y) for x, y in zip(before, server.pool.get_kv_buffer(0), strict=True))


@pytest.mark.parametrize("window_pool", [False, True])
def test_rows_of_padding(window_pool: bool) -> None:
    """Prompts that SGLang pads for other ranks: their rows are 0, and nothing of them is written."""
    server = Server(window_pool=window_pool)
    step = server.requests.step({1: 20, 2: 3})
    batch = server.batch(step)
    batch.global_num_token_non_padded_cpu = 23
    batch.out_cache_loc = torch.cat((step.slots, torch.zeros(3, dtype=torch.int64)))
    server.backend.init_forward_metadata(batch)
    q, k, v = (torch.cat((x, torch.full((3, *x.shape[1:]), float("nan")))) for x in (step.q, step.k, step.v))
    with forward_context(ForwardContext(attn_backend=server.backend)):
        got = server.layers[0](q.reshape(26, -1), k, v, batch)
    server.check(got[:23].reshape(23, -1), step)
    assert not got[23:].any()


def test_idle() -> None:
    server = Server()
    batch = server.batch(server.requests.step({}), ForwardMode.IDLE)
    server.backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=server.backend)):
        assert server.layers[0](torch.zeros(0, HEADS * DIM), None, None, batch).shape == (0, HEADS * DIM)


def test_like_sglangs_own_backend() -> None:
    """On the same pool: torch_native, of SGLang."""
    server = Server(1, dtype=torch.float16, layer={"sliding_window_size": 12})
    other = TorchNativeAttnBackend(server.runner)
    for mode, new in STEPS:
        got, step = server.run(new, mode)
        batch = server.batch(step, mode)
        other.init_forward_metadata(batch)
        want = server.call(step, batch, backend=other, save_kv_cache=False)
        torch.testing.assert_close(got, want, rtol=0, atol=3e-3)


# Speculative decoding, graphs, determinism.


@pytest.mark.parametrize("wants_lse", [False, True])
@pytest.mark.parametrize(("new", "padding"), [({1: 3, 2: 3}, 2), ({1: 3, 2: 3, 3: 3}, 1), ({1: 3}, 1)])
def test_verification_with_rows_of_padding(new: dict[int, int], padding: int, wants_lse: bool) -> None:
    """Data parallel attention rounds the rows up, and not to whole requests."""
    server = Server(16)
    server.run({1: 37, 2: 5, 3: 9})
    step = server.requests.step(new)
    batch = server.batch(step, ForwardMode.TARGET_VERIFY, spec_info=guess(num_tokens_per_req=3, draft_token_num=3))
    rows = sum(new.values()) + padding
    batch.input_ids, batch.out_cache_loc = (
        torch.nn.functional.pad(x, (0, padding)) for x in (batch.input_ids, batch.out_cache_loc)
    )
    batch.batch_size = rows // 3
    server.backend.init_forward_metadata(batch)
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding), value=7.0) for x in (step.q, step.k, step.v))
    with forward_context(ForwardContext(attn_backend=server.backend)):
        got = server.layers[0](q.reshape(rows, -1), k, v, batch, **({"return_lse": True} if wants_lse else {}))
    if wants_lse:
        got, lse = got
        assert lse.shape == (rows, HEADS)
        assert lse[: rows - padding].isfinite().all()
        assert (lse[rows - padding :] == -torch.inf).all()
    assert got.shape == (rows, HEADS * DIM)
    server.check(got[: rows - padding], step)
    assert not got[rows - padding :].any()


def test_verification_of_a_chain() -> None:
    server = Server(16, layer={"sliding_window_size": 30})
    server.run({1: 37, 4: 5})
    for _ in range(2):
        step = server.requests.step({4: 4, 1: 4})
        batch = server.batch(step, ForwardMode.TARGET_VERIFY, spec_info=guess())
        server.backend.init_forward_metadata(batch)
        server.check(server.call(step, batch), step, left=30)
        server.requests.drop(4, 3)
        server.requests.drop(1, 1)


@pytest.mark.parametrize("window_pool", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_graphs(window_pool: bool, tokens: int) -> None:
    """What SGLang's graph runner calls: the graph writes tables anew, into arrays that stay, with padded requests."""
    server = Server(16, layer={"sliding_window_size": 40}, window_pool=window_pool)
    backend, bs = server.backend, 4
    server.run({1: 37, 2: 5, 3: 1})
    backend.init_cuda_graph_state(8, 8 * tokens)
    verify = tokens > 1
    mode = ForwardMode.TARGET_VERIFY if verify else ForwardMode.DECODE
    fill = backend.get_cuda_graph_seq_len_fill_value()
    static = ForwardBatch(
        forward_mode=mode, batch_size=bs, input_ids=torch.zeros(bs * tokens, dtype=torch.int64),
        req_pool_indices=torch.zeros(bs, dtype=torch.int64), seq_lens=torch.full((bs,), fill),
        out_cache_loc=torch.zeros(bs * tokens, dtype=torch.int64), seq_lens_sum=0,
        spec_info=guess() if verify else None,
    )  # fmt: skip
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)
    addresses = backend.forward_metadata.table.data_ptr(), backend.forward_metadata.seq_lens.data_ptr()
    for rows in ((2, 1, 3), (3, 1)):
        step = server.requests.step(dict.fromkeys(rows, tokens))
        fields = step.fields(mode, counts_new=not verify)
        for name, padding in (("req_pool_indices", 0), ("seq_lens", fill), ("out_cache_loc", 0)):
            getattr(static, name).fill_(padding)[: fields[name].shape[0]] = fields[name]
        backend.init_forward_metadata_out_graph(static)
        backend.init_forward_metadata_in_graph(static)
        q, k, v = (torch.zeros((bs * tokens, *x.shape[1:])) for x in (step.q, step.k, step.v))
        for full, x in ((q, step.q), (k, step.k), (v, step.v)):
            full[: x.shape[0]] = x
        with forward_context(ForwardContext(attn_backend=backend)):
            got = server.layers[0](q.reshape(bs * tokens, -1), k, v, static)
        server.check(got[: sum(step.new)], step, left=40)
        assert (backend.forward_metadata.table.data_ptr(), backend.forward_metadata.seq_lens.data_ptr()) == addresses


def test_deterministic_inference() -> None:
    with configuration(enable_deterministic_inference=True):
        server = Server()
    assert server.backend.deterministic
    calls: list[Any] = []
    attention = oa.attention_with_kvcache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oa, "attention_with_kvcache", lambda *a, **k: calls.append(k) or attention(*a, **k))
        check_steps(server)
    assert len(calls) == len(STEPS)
    assert all(options["deterministic"] for options in calls)
