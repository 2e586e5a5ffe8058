"""The device on which tests run, and what some of them ask of it."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type != "cpu"
HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
