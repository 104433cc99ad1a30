"""An independent draft model (Leviathan et al., 2211.17192): any small causal language model."""

from paceline.methods.method import Method

METHOD = Method(
    name="independent",
    reads="nothing",
    drafter="paceline.methods.independent.drafter:IndependentDrafter",
    recipe="paceline.methods.independent.recipe:RECIPE",
    serves=("paceline", "transformers"),
    is_one_pass=False,
)
