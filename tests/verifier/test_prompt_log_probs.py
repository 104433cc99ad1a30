"""Log-probabilities of a prompt over real gRPC, however the prompt is cut into chunks."""

from __future__ import annotations

import pytest

from paceline.target import SequenceRows, TargetEngine
from paceline.v1 import peer_pb2, sampling_pb2, target_pb2
from services.runtime.process import Process
from tests.verifier.conductor import VOCAB_SIZE, Conductor
from tests.verifier.test_stream import PROMPT


@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("num_resumed", [0, 2])
async def test_prompt_log_probs_however_the_prompt_is_cut(
    verifier: Process, engine: TargetEngine, chunk: int, num_resumed: int
) -> None:
    prompt = [5, 9, 17, 3, 44, 12, 9, 9, 31, 2]
    slot = engine.open()
    rows = engine.step([SequenceRows(slot, prompt)]).logits[0].log_softmax(-1)
    engine.close(slot)
    policy = peer_pb2.StepPolicy(version=2, max_prefill_tokens_per_step=chunk)
    async with Conductor(verifier.port) as conductor:
        await conductor.send(policy=policy)
        sequence = await conductor.open(
            prompt,
            4,
            num_resumed_tokens=num_resumed,
            log_probs=sampling_pb2.LogProbOptions(num_prompt_top=2),
        )
        await conductor.finish(sequence)
    reports = [report for report in conductor.log_probs[sequence] if report.HasField("prompt")]
    next_position = 1
    for report in reports:
        assert report.prompt_start == next_position
        next_position += len(report.prompt.log_probs)
    assert next_position == len(prompt) - num_resumed
    values = [value for report in reports for value in report.prompt.log_probs]
    expected = [float(rows[at - 1, prompt[at]]) for at in range(1, next_position)]
    assert values == pytest.approx(expected, abs=1e-4)
    tops = [value for report in reports for value in report.prompt.top_token_ids]
    assert tops == rows[: next_position - 1].topk(2).indices.flatten().tolist()
    assert not any(report.committed.log_probs for report in conductor.log_probs[sequence])


async def test_prompts_whose_logits_are_wanted_share_a_bound(verifier: Process, engine: TargetEngine) -> None:
    prompts = [[(7 * place + which) % VOCAB_SIZE for place in range(190)] for which in range(3)]
    options = sampling_pb2.LogProbOptions(num_prompt_top=0)
    openings = [
        target_pb2.OpenSequence(
            key=which + 1,
            prompt_token_ids=prompt,
            max_new_tokens=2,
            max_draft_nodes=0,
            sampling=sampling_pb2.SamplingParams(temperature=0.0),
            log_probs=options,
        )
        for which, prompt in enumerate(prompts)
    ]
    async with Conductor(verifier.port) as conductor:
        await conductor.send(opens=openings)
        await conductor.read_until(lambda: len(conductor.finished) == 3)
        assert 190 < max(step.num_prefill_rows for step in conductor.steps) <= 256
        for which, prompt in enumerate(prompts):
            reports = conductor.log_probs[conductor.opened[which + 1]]
            values = [value for report in reports for value in report.prompt.log_probs]
            slot = engine.open()
            rows = engine.step([SequenceRows(slot, prompt)]).logits[0].log_softmax(-1)
            engine.close(slot)
            expected = [float(rows[at - 1, prompt[at]]) for at in range(1, len(prompt))]
            assert values == pytest.approx(expected, abs=1e-4)


async def test_who_does_not_ask_gets_nothing(verifier: Process) -> None:
    async with Conductor(verifier.port) as conductor:
        await conductor.finish(await conductor.open(PROMPT, 4))
        assert not any(step.log_probs for step in conductor.steps)
