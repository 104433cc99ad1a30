"""What the public layouts of all methods are made of."""
