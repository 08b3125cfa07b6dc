"""PyTorch: gradients."""
