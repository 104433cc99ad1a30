"""DFlash: a block of tokens in one pass, over features of the text as keys and values."""

from paceline.methods.method import Method

METHOD = Method(
    name="dflash",
    reads="several layers, fused",
    drafter="paceline.methods.dflash.drafter:DFlashDrafter",
    recipe="paceline.methods.dflash.recipe:RECIPE",
    layouts={
        "speculators": "paceline.methods.speculators.layout:SPECULATORS",
        "dflash": "paceline.methods.block_diffusion.layouts:DFLASH",
        "deepspec": "paceline.methods.block_diffusion.layouts:DEEPSPEC",
    },
    speculators="paceline.methods.dflash.speculators:KIND",
    is_one_pass=True,
    draft_map="d2t",
)
