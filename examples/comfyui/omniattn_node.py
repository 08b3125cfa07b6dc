"""A ComfyUI node that makes a model attend with omniattn. Copy this file into ComfyUI's folder custom_nodes."""

from __future__ import annotations

from typing import Any

from omniattn.integrations.comfyui import override, override_int8

OVERRIDES = {"exact": override, "int8": override_int8}


class OmniattnAttention:
    """Model in, the same model with another attention out; the model that came in stays as it was."""

    CATEGORY = "model_patches"
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Sockets and widgets, as ComfyUI asks for them."""
        return {"required": {"model": ("MODEL",), "precision": (list(OVERRIDES),)}}

    def patch(self, model: Any, precision: str) -> tuple[Any]:
        """What ComfyUI runs."""
        patched = model.clone()
        # Clones share the inner dictionary.
        options = dict(patched.model_options.get("transformer_options", {}))
        options["optimized_attention_override"] = OVERRIDES[precision]
        patched.model_options["transformer_options"] = options
        return (patched,)


NODE_CLASS_MAPPINGS = {"OmniattnAttention": OmniattnAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"OmniattnAttention": "Attention: omniattn"}
