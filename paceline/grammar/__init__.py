"""Structured output: the completion belongs to a formal language, whatever is drafted.

`forms` writes a request's constraint as a grammar, `compiler` compiles it for one tokenizer, `rule` masks a
sequence's logits with it. A grammar is text from an untrusted client, and compiling it recurses deeply. So
`checker` has every new one tried first in a child process (`check_process`), where a grammar that never ends, or
overflows the stack, harms nobody.

Grammars and masks are the library llguidance's (MIT): Earley parsing over a lexer of regular-expression
derivatives, walked along a trie of the vocabulary.

The gateway imports `checker` and `refusal`: they load neither torch nor llguidance, which only the child needs.
"""
