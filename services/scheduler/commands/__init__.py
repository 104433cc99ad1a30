"""What the scheduler knows, for people: `paceline curves` and `paceline policy`."""
