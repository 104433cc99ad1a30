"""EAGLE-1 (2401.15077): one decoder layer that predicts the target's next feature."""

from paceline.methods.method import Method

METHOD = Method(
    name="eagle1",
    reads="final norm",
    drafter="paceline.methods.eagle1.drafter:Eagle1Drafter",
    recipe="paceline.methods.eagle1.recipe:RECIPE",
    layouts={
        "eagle": "paceline.methods.eagle.layout:EAGLE",
    },
    is_one_pass=False,
    ahead_fraction=0.71,
    draft_map="token_map",
)
