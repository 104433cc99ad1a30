"""Stats of a generation as a line for people.

Responsible for: which stats are printed, and their units. Deliberately does not know: where the line is
printed. Called by ``paceline generate``.
"""

from __future__ import annotations

from paceline.client.events import Completion, Stats

_NO_DRAFTS = {
    "request": "no drafts: the request turned them off",
    "policy": "no drafts: the policy turned them off (see `paceline policy`)",
    "missing": "no drafts: no drafter had this text",
    "late": "no drafts verified: they came too late, or none was chosen",
}


def stats_line(stats: Stats, finish_reason: str) -> str:
    """Speed, tokens per target pass, acceptance by position, time to the first token, length."""
    parts = [f"{stats.tokens_per_s:.1f} tokens/s", f"{stats.tokens_per_pass:.2f} tokens per target pass"]
    if stats.drafted_per_position:
        rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_per_position)
        parts.append(f"acceptance by position {rates}")
    elif stats.no_draft_reason:
        parts.append(_NO_DRAFTS[stats.no_draft_reason])
    parts.append(f"first token {stats.time_to_first_token_s * 1e3:.0f} ms")
    parts.append(f"{stats.num_generated_tokens} tokens ({finish_reason})")
    return " | ".join(parts)


def comparison_line(speculative: Completion, plain: Completion) -> str:
    """How much faster, and whether the texts are identical."""
    plain_speed = plain.stats.tokens_per_s
    ratio = f"{speculative.stats.tokens_per_s / plain_speed:.2f} times plain" if plain_speed else "no ratio"
    if speculative.token_ids == plain.token_ids:
        return f"{ratio}; the texts are identical, token for token"
    pairs = zip(speculative.token_ids, plain.token_ids, strict=False)
    shorter = min(len(speculative.token_ids), len(plain.token_ids))
    same = next((index for index, (left, right) in enumerate(pairs) if left != right), shorter)
    return (
        f"{ratio}; the texts differ from token {same + 1} on "
        "(without the CPU kernels bfloat16 rounds differently in passes of different size; see `paceline doctor`, "
        "or compare with --dtype float32)"
    )
