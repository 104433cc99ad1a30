"""PARD-2: PARD's model with the target's features beside its input, or without them."""

from paceline.methods.method import Method

METHOD = Method(
    name="pard2",
    reads="final norm and layers, projected; or nothing",
    drafter="paceline.methods.pard2.drafter:Pard2Drafter",
    recipe="paceline.methods.pard2.recipe:RECIPE",
    layouts={
        "pard": "paceline.methods.pard.layout:PARD",
    },
    is_one_pass=True,
)
