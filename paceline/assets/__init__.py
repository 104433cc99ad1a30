"""Data files that ship with the library: prompts for tests, demos and benchmarks, and trained defaults."""
