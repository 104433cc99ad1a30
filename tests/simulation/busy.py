"""A world in which every kind of event happens within seconds; a seed makes it repeatable."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from paceline.contract.policy import StepPolicy
from tests.simulation.kit import MAX_NEW_TOKENS, SAMPLINGS, Kit, Placement
from tests.simulation.world import World

NUM_ROUNDS = 90
MAX_OPEN = 14


def run_busy_world(kit: Kit, placements: Sequence[Placement], seed: int) -> Counter[str]:
    """Run one world to its end; returns its events.

    Raises:
        AssertionError: a sequence committed another token than its plain text has.
    """
    world = World(kit, placements, (1 << 20, 1 << 20), ngram_tokens=(8, 0))
    try:
        dice = random.Random(seed)
        for at in range(2):
            world.peers[at].verifier.limit_kv(1024)
        for number in range(NUM_ROUNDS):
            _open(world, dice)
            _disturb(world, dice, number)
            _draft(world, dice)
            for at in range(2):
                world.step(at)
        world.run_out()
    except BaseException:
        world.abandon()
        raise
    return world.events


def _open(world: World, dice: random.Random) -> None:
    while len(world.open_requests) < MAX_OPEN and dice.random() < 0.7:
        world.open(
            dice.randrange(len(world.kit.prompts)),
            dice.randrange(len(SAMPLINGS)),
            dice.randint(1, MAX_NEW_TOKENS),
            dice.choice([0, 1, 4, 16, 16]),
            dice.randrange(2),
            stops=dice.random() < 0.3,
        )


def _disturb(world: World, dice: random.Random, number: int) -> None:
    at = dice.randrange(2)
    if dice.random() < 0.2:
        nodes = dice.randint(1, 16)
        world.set_policy(
            at,
            StepPolicy(
                max_nodes_per_sequence=nodes,
                max_nodes_per_step=dice.choice([2, 64]),
                max_prefill_tokens_per_step=dice.choice([1, 7, 64]),
                draft_length=dice.randint(0, 16),
            ),
        )
    requests = world.open_requests
    if requests and dice.random() < 0.1:
        world.move(dice.choice(requests), dice.randrange(2))
    if len(requests) > 2 and dice.random() < 0.05:
        world.cancel(dice.choice(requests))
    if dice.random() < 0.05:
        world.preempt(at)
    if dice.random() < 0.1:
        world.peers[at].verifier.limit_kv(dice.choice([None, 256, 384, 768, 1024]))
    if number in (30, 60):
        world.lose_stream(at)


def _draft(world: World, dice: random.Random) -> None:
    for at in range(2):
        if dice.random() < 0.4:
            world.traffic.draft(at, dice.randint(1, 16), dice.randint(1, 16))
            if dice.random() < 0.7:
                world.traffic.draft_past_outcomes(
                    at, dice.randint(1, 4), dice.randint(1, 12), dice.randint(1, 2)
                )
    for request in world.open_requests:
        if dice.random() < 0.6:
            world.traffic.draft_by_script(
                request,
                dice.choice([0, 0, 0, 0, -3, 2]),
                dice.randint(1, 20),
                [place for place in range(20) if dice.random() < 0.08],
                dice.choice([0, 0, 1, 3]),
                dice.choice([0] * 8 + [1]),
            )
    while world.traffic.messages and dice.random() < 0.93:
        which = dice.randrange(len(world.traffic.messages))
        if dice.random() < 0.1:
            world.traffic.lose(which)
        else:
            world.traffic.deliver(which, keep=dice.random() < 0.1)
