"""The commands `paceline curves` and `paceline policy`, which print what the scheduler has measured and decided."""
