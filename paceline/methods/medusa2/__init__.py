"""Medusa-2 (2401.10774): Medusa's heads, trained together with their target."""

from paceline.methods.method import Method

METHOD = Method(
    name="medusa2",
    reads="final norm, newest position alone",
    drafter="paceline.methods.medusa2.drafter:Medusa2Drafter",
    recipe="paceline.methods.medusa2.recipe:RECIPE",
    layouts={
        "medusa": "paceline.methods.medusa_heads.layout:MEDUSA",
        "vllm": "paceline.methods.medusa_heads.vllm_layout:VLLM",
    },
    is_one_pass=True,
    draft_map="token_map",
)
