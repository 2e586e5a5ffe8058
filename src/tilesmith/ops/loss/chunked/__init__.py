"""The losses in plain PyTorch, chunk by chunk, on any device."""
