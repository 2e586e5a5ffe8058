"""A plugin of Axolotl that draws adapters from a seed, which Axolotl itself does not; for test_trainers.py."""

import torch
from axolotl.integrations.base import BasePlugin


class SeedPlugin(BasePlugin):
    """Seeds just before adapters are made."""

    def pre_lora_load(self, cfg, model):
        torch.manual_seed(0)
