"""The verifier process."""
