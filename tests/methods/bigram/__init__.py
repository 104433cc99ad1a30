"""A toy method: the next token follows from the last one alone, through two tables of low rank.

The steps of CONTRIBUTING, followed once; `tests/training/test_new_method.py` trains, exports and serves it.
"""

from paceline.methods.method import Method

METHOD = Method(
    name="bigram",
    reads="nothing",
    drafter="tests.methods.bigram.drafter:BigramDrafter",
    recipe="tests.methods.bigram.recipe:RECIPE",
    is_one_pass=False,
    layouts={
        "bigram_tables": "tests.methods.bigram.layout:BIGRAM_TABLES",
    },
)
