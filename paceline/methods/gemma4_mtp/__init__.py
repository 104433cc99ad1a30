"""Gemma 4's assistant: a narrow model that reads the target's own keys and values."""

from paceline.methods.method import Method

METHOD = Method(
    name="gemma4_mtp",
    reads="keys and values of a full and a sliding layer, final norm of the newest position",
    drafter="paceline.methods.gemma4_mtp.drafter:Gemma4MtpDrafter",
    recipe="paceline.methods.gemma4_mtp.recipe:RECIPE",
    layouts={
        "gemma4_assistant": "paceline.methods.gemma4_mtp.assistant:GEMMA4_ASSISTANT",
    },
    is_one_pass=False,
    ahead_fraction=0.83,
)
