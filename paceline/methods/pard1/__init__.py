"""PARD: a small language model that drafts all tokens in one pass over mask tokens."""

from paceline.methods.method import Method

METHOD = Method(
    name="pard1",
    reads="nothing",
    drafter="paceline.methods.pard1.drafter:Pard1Drafter",
    recipe="paceline.methods.pard1.recipe:RECIPE",
    serves=("paceline", "transformers"),
    layouts={
        "pard": "paceline.methods.pard.layout:PARD",
    },
    is_one_pass=True,
)
