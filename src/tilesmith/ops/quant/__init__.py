"""Numbers in 8 bits: casts with their factors, norms and activations that cast what they make, products of what was
cast."""
