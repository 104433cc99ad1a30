"""What the conductor between verifier and drafter costs: a round through it, and one over a direct stream."""
