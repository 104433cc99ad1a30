"""EAGLE-3 (2503.01840): one decoder layer over three fused layers of the target."""

from paceline.methods.method import Method

METHOD = Method(
    name="eagle3",
    reads="three layers, fused",
    drafter="paceline.methods.eagle3.drafter:Eagle3Drafter",
    recipe="paceline.methods.eagle3.recipe:RECIPE",
    layouts={
        "eagle": "paceline.methods.eagle.layout:EAGLE",
        "speculators": "paceline.methods.speculators.layout:SPECULATORS",
    },
    speculators="paceline.methods.eagle3.speculators:KIND",
    is_one_pass=False,
    ahead_fraction=0.66,
    draft_map="d2t",
)
