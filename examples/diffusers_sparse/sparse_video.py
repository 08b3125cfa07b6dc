"""Block-sparse attention at 8 bits in a pipeline of diffusers, with shares of blocks calibrated for each head.

python examples/diffusers_sparse/sparse_video.py               # CPU, seconds
python examples/diffusers_sparse/sparse_video.py --device cuda # a GPU of compute capability 9.0

A ``WanPipeline`` with a tiny random transformer makes the latents of a video three times: by diffusers' own attention,
in ``precision="int8"``, and with the blocks left out that `omniattn.calibrate_sparse` found to matter least in the
first ``--calibration`` steps. Of a real model, load its pipeline in place of `tiny_pipeline` and raise ``--steps``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

import omniattn as oa

#: What attends: (name of the layer, q, k, v) -> o, all of (batch, tokens, heads, head_dim).
Attend = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class SelfAttention:
    """A processor for the self-attention of Wan's blocks, in place of diffusers' own.

    Parameters
    ----------
    name : str
        Of the layer, for ``attend``.
    attend : callable
    """

    def __init__(self, name: str, attend: Attend) -> None:
        self.name = name
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError(f"{self.name}: self-attention without a mask is expected")
        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, attn.to_v(hidden_states)))
        if rotary_emb is not None:
            q, k = (rotated(x, *rotary_emb) for x in (q, k))
        o = self.attend(self.name, q, k, v).flatten(2)
        for layer in attn.to_out:
            o = layer(o)
        return o


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Channels 2i and 2i + 1 as complex numbers, turned by the angle of their position; in x's dtype."""
    turns = torch.complex(cos[..., 0::2].float(), sin[..., 1::2].float())
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def self_attentions(transformer: Any) -> dict[str, Any]:
    """The self-attention of each block by its name in the model."""
    return {f"blocks.{i}.attn1": block.attn1 for i, block in enumerate(transformer.blocks)}


def use(transformer: Any, attend: Attend | None) -> None:
    """Let self-attention run by ``attend``; None: by diffusers again."""
    for name, layer in self_attentions(transformer).items():
        layer.set_processor(WanAttnProcessor() if attend is None else SelfAttention(name, attend))


class Recorder:
    """Exact attention that keeps what it is called with, on the host.

    Attributes
    ----------
    tensors : dict of str to list of (q, k, v)
        By layer, a triple a call.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, list[tuple[torch.Tensor, ...]]] = {}

    def __call__(self, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.tensors.setdefault(name, []).append(tuple(x.cpu() for x in (q, k, v)))
        return oa.attention(q, k, v)


class OnDevice:
    """Recorded triples of a layer, put on a device one at a time: what `calibrate_sparse` runs through."""

    def __init__(self, triples: Sequence[tuple[torch.Tensor, ...]], device: torch.device) -> None:
        self.triples, self.device = triples, device

    def __iter__(self) -> Any:
        return (tuple(x.to(self.device) for x in one) for one in self.triples)


def sparse_attention(file: Path, names: Sequence[str]) -> Attend:
    """8-bit attention that leaves out blocks as ``file`` says for each layer and head."""
    # A value for each layer, made once: calls with the same precision find their plan again.
    precisions = {name: oa.Int8(sparse=oa.Sparse(file=file, name=name)) for name in names}
    return lambda name, q, k, v: oa.attention(q, k, v, precision=precisions[name])


def tiny_pipeline(device: torch.device) -> WanPipeline:
    """A real pipeline around a random transformer whose tokens look at those that are near and alike."""
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=32,
        freq_dim=64, ffn_dim=128, num_layers=2, rope_max_seq_len=64,
    )  # fmt: skip
    with torch.no_grad():
        for layer in self_attentions(transformer).values():
            # Random queries and keys would see every token alike.
            layer.to_k.load_state_dict(layer.to_q.state_dict())
            layer.norm_q.weight.copy_(torch.tensor([2.0, 1.2]).repeat_interleave(64))
    pipeline = WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(shift=3.0), transformer)
    pipeline.set_progress_bar_config(disable=True)
    transformer.to(device)
    if device.type == "cuda":  # where attention takes 16 bits
        transformer.to(torch.bfloat16)
    return pipeline


def latents_of(pipeline: WanPipeline, steps: int, size: tuple[int, int, int]) -> torch.Tensor:
    """The latents of a video of (frames, height, width), from the same noise and prompt each time."""
    frames, height, width = size
    model = pipeline.transformer
    prompt = torch.randn(1, 16, model.config.text_dim, generator=torch.Generator().manual_seed(1))
    made = pipeline(
        prompt_embeds=prompt.to(model.device, model.dtype), num_frames=frames, height=height, width=width,
        num_inference_steps=steps, guidance_scale=1.0, output_type="latent",
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    return made.frames.float().cpu()


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Calibrate, run, compare; relative L1 of the latents by what made them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--calibration", type=int, default=2, help="of these steps that are calibrated on")
    parser.add_argument("--max-error", type=float, default=0.1, help="relative L1 of each head")
    parser.add_argument("--size", type=int, nargs=3, default=(17, 192, 192), metavar=("FRAMES", "HEIGHT", "WIDTH"))
    parser.add_argument("--file", type=Path, help="where the calibration is written; read where it is there already")
    options = parser.parse_args(arguments)
    device, size = torch.device(options.device), tuple(options.size)
    pipeline = tiny_pipeline(device)
    transformer = pipeline.transformer
    names = list(self_attentions(transformer))
    want = latents_of(pipeline, options.steps, size)

    with tempfile.TemporaryDirectory() as folder:
        file = options.file or Path(folder) / "sparse.json"
        if not file.exists():
            recorder = Recorder()
            use(transformer, recorder)
            latents_of(pipeline, options.calibration, size)
            tensors = {name: OnDevice(recorder.tensors[name], device) for name in names}
            print(oa.calibrate_sparse(tensors, max_error=options.max_error, file=file))
        errors = {}
        for label, attend in (
            ("int8", lambda name, q, k, v: oa.attention(q, k, v, precision="int8")),
            ("int8, sparse", sparse_attention(file, names)),
        ):
            use(transformer, attend)
            made = latents_of(pipeline, options.steps, size)
            errors[label] = float((made - want).abs().sum() / want.abs().sum())
            print(f"latents after {options.steps} steps, {label}: relative L1 {errors[label]:.4f}")
        use(transformer, None)
    return errors


if __name__ == "__main__":
    main()
