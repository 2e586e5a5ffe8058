"""Device functions in Triton that op families share."""
