"""Who sees whom in a step, and attention over the slots."""
