"""DSpark: DFlash's block with a Markov head between its tokens and a confidence head."""

from paceline.methods.method import Method

METHOD = Method(
    name="dspark",
    reads="several layers, fused",
    drafter="paceline.methods.dspark.drafter:DSparkDrafter",
    recipe="paceline.methods.dspark.recipe:RECIPE",
    layouts={
        "speculators": "paceline.methods.speculators.layout:SPECULATORS",
        "deepspec": "paceline.methods.block_diffusion.layouts:DEEPSPEC",
    },
    speculators="paceline.methods.dspark.speculators:KIND",
    is_one_pass=True,
    draft_map="d2t",
    draft_rows=("lm_head.", "markov_head.markov_w2."),
)
