"""What public layouts of checkpoints are made of, whatever the method."""
