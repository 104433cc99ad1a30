"""What an output head in clusters saves and what it loses: `python -m experiments.clusters`."""
