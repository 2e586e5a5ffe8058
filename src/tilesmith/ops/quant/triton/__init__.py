"""Casts and fused producers in Triton."""
