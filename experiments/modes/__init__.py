"""What each verification mode accepts, and what it sends, measured with real models in one process."""
