"""DSpark: DFlash's block with a Markov head between its tokens and a confidence head."""

from paceline.methods.method import Method

METHOD = Method(
    name="dspark",
    reads="several layers, fused",
    drafter="paceline.methods.dspark.drafter:DSparkDrafter",
    recipe="paceline.methods.dspark.recipe:RECIPE",
    formats=("paceline", "speculators", "deepspec"),
    is_one_pass=True,
)
