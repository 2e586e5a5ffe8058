"""Norms: RMS and layer normalisation of the last dim, alone or together with the residual addition before them."""

from tilesmith.ops.norm.op import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]
