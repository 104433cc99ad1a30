"""How often drafted text equals plain text, by dtype and executor: `python -m experiments.equality`."""
