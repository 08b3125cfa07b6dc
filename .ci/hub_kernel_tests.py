"""A folder of build_tools/hub_kernel.py by `kernels`' own loader, and as the attention of a transformers model."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

folder = Path(sys.argv[1])
os.environ["LOCAL_KERNELS"] = f"omniattn/omniattn={folder}"

import torch  # noqa: E402
import transformers  # noqa: E402
from kernels import get_local_kernel  # noqa: E402

oa = get_local_kernel(folder, backend="cpu")
q, k, v = (torch.randn(1, 16, 2, 32) for _ in range(3))
heads_first = [x.transpose(1, 2) for x in (q, k, v)]
want = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
torch.testing.assert_close(oa.attention(q, k, v, causal=True), want, atol=1e-5, rtol=1e-5)
torch.testing.assert_close(oa.flash_attn_func(q, k, v, causal=True), want, atol=1e-5, rtol=1e-5)

config = transformers.LlamaConfig(
    vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
model = transformers.AutoModelForCausalLM.from_config(config).eval()
tokens = torch.randint(32, (2, 12))
with torch.no_grad():
    want = model(tokens).logits
    importlib.import_module(f"{oa.__name__}.integrations.transformers").register()
    model.set_attn_implementation("omniattn")
    torch.testing.assert_close(model(tokens).logits, want, atol=1e-4, rtol=1e-4)
assert not [name for name in sys.modules if name.partition(".")[0] == "omniattn"], "the installed package was imported"
print(f"{oa.__name__}: loaded by kernels, without the installed package")
