"""A folder of build_tools/hub_kernel.py as ``attn_implementation="omniattn/omniattn"`` of a transformers model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

folder = Path(sys.argv[1])
os.environ["LOCAL_KERNELS"] = f"omniattn/omniattn={folder}"

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import modeling_flash_attention_utils as flash  # noqa: E402

config = transformers.LlamaConfig(
    vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
torch.manual_seed(0)
# transformers calls functions of flash-attn in 16 bits alone.
model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
tokens = torch.randint(32, (2, 12))
padded = torch.ones_like(tokens)
padded[1, :4] = 0


def results() -> list[torch.Tensor]:
    """Logits of a batch, of one with padding, and the loss's gradient."""
    model.zero_grad()
    logits = model(tokens).logits
    with torch.no_grad():
        few = model(tokens, attention_mask=padded).logits[padded.bool()]
    model(tokens, labels=tokens).loss.backward()
    return [logits.detach(), few, model.model.layers[0].self_attn.q_proj.weight.grad]


model.set_attn_implementation("sdpa")
want = results()
model.set_attn_implementation("omniattn/omniattn")
assert model.config._attn_implementation == "omniattn/omniattn"
used = (flash._flash_fn, flash._flash_varlen_fn)
assert all(function.__module__.endswith(".compat.flash_attn") for function in used), used
for got, expected in zip(results(), want, strict=True):
    assert expected.float().abs().max() > 1e-3
    torch.testing.assert_close(got, expected, atol=0.02 * expected.float().abs().max().item(), rtol=0)
assert not [name for name in sys.modules if name.partition(".")[0] == "omniattn"], "the installed package was imported"
print(f'transformers {transformers.__version__}: attn_implementation="omniattn/omniattn"')
