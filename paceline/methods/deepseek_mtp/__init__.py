"""DeepSeek-style multi-token prediction (2412.19437): modules that predict one further token each."""

from paceline.methods.method import Method

METHOD = Method(
    name="deepseek_mtp",
    reads="last hidden state",
    drafter="paceline.methods.deepseek_mtp.drafter:DeepseekMtpDrafter",
    recipe="paceline.methods.deepseek_mtp.recipe:RECIPE",
    layouts={
        "nextn": "paceline.methods.deepseek_mtp.nextn:NEXTN",
        "speculators": "paceline.methods.speculators.layout:SPECULATORS",
    },
    speculators="paceline.methods.deepseek_mtp.speculators:KIND",
    is_one_pass=False,
    ahead_fraction=0.88,
    draft_map="token_map",
)
