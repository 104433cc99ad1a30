"""Medusa-1 (2401.10774): heads on the target's last hidden state, the target frozen."""

from paceline.methods.method import Method

METHOD = Method(
    name="medusa1",
    reads="final norm, newest position alone",
    drafter="paceline.methods.medusa1.drafter:Medusa1Drafter",
    recipe="paceline.methods.medusa1.recipe:RECIPE",
    layouts={
        "medusa": "paceline.methods.medusa_heads.layout:MEDUSA",
        "vllm": "paceline.methods.medusa_heads.vllm_layout:VLLM",
    },
    is_one_pass=True,
    draft_map="token_map",
)
