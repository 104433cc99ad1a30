"""Medusa-1 (2401.10774): heads on the target's last hidden state, the target frozen."""

from paceline.methods.method import Method

METHOD = Method(
    name="medusa1",
    reads="final norm, newest position alone",
    drafter="paceline.methods.medusa1.drafter:Medusa1Drafter",
    recipe="paceline.methods.medusa1.recipe:RECIPE",
    formats=("paceline", "medusa", "vllm"),
    is_one_pass=True,
)
