"""omniattn: attention kernels for every array framework and every NVIDIA GPU from Ampere on."""

__version__ = "0.1.0"
