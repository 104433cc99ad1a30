"""P-EAGLE: EAGLE-3's layers, with all tokens of a draft in one pass over mask positions."""

from paceline.methods.method import Method

METHOD = Method(
    name="p_eagle",
    reads="three layers, fused",
    drafter="paceline.methods.p_eagle.drafter:PEagleDrafter",
    recipe="paceline.methods.p_eagle.recipe:RECIPE",
    layouts={
        "speculators": "paceline.methods.speculators.layout:SPECULATORS",
        "p_eagle": "paceline.methods.p_eagle.layout:P_EAGLE",
    },
    speculators="paceline.methods.p_eagle.speculators:KIND",
    is_one_pass=True,
    draft_map="d2t",
)
