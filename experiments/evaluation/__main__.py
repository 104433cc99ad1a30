"""`python -m experiments.evaluation`: as `paceline evaluate`."""

from __future__ import annotations

import typer

from experiments.evaluation.command import evaluate

if __name__ == "__main__":
    typer.run(evaluate)
