"""pytest where torchvision may be built for CUDA and torch is not. SGLang imports torchvision, and calls nothing of it.

Such a torchvision cannot load its operators, and looks for two of them when it is imported.
"""

import sys
from importlib import metadata

import pytest
import torch

if "+cpu" in torch.__version__ and "+cpu" not in metadata.version("torchvision"):
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.exit(pytest.main(sys.argv[1:]))
