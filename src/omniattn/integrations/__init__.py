"""Attention backends for other libraries: `transformers`, `diffusers`, `comfyui`, `vllm`, `sglang`.

Each module imports its library when it is imported itself, and is above the public functions: it calls only those.
"""
