"""DrafterPlacement experiments and benchmarks."""
