"""`python -m experiments.verification`: the same as `paceline bench-verification`."""

import typer

from experiments.verification.command import bench_verification

if __name__ == "__main__":
    typer.run(bench_verification)
