"""`generate` of transformers models by recorded steps: one CUDA graph for a whole token."""
