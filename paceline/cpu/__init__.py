"""CPU kernels and what exists for them alone."""
