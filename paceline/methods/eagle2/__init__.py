"""EAGLE-2 (2406.16858): EAGLE-1's layer with dynamic trees."""

from paceline.methods.method import Method

METHOD = Method(
    name="eagle2",
    reads="final norm",
    drafter="paceline.methods.eagle2.drafter:Eagle2Drafter",
    recipe="paceline.methods.eagle2.recipe:RECIPE",
    layouts={
        "eagle": "paceline.methods.eagle.layout:EAGLE",
    },
    is_one_pass=False,
    ahead_fraction=0.72,
    draft_map="token_map",
)
