"""Public checkpoint formats, one module each: from a public directory to a drafter's config and tensors, and back."""
