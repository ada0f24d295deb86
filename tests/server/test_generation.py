"""A reader that falls behind gets several steps as one; what they hold is the same."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from fake_engine import FakeTokenizer

from exactspec.server import messages as m
from exactspec.server.errors import ApiError
from exactspec.server.generation import Generation, Prompt
from exactspec.types import FinishReason, RequestStats, SamplingParams, StepOutput, TokenLogprob, TokenSource

TEXT = "naïve € and the 日本"


class FakeClient:
    """Keeps the mailbox of every request, for the test to fill."""

    info: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.mailboxes: dict[str, Any] = {}
        self.aborted: list[str] = []

    def submit(self, request: Any, mailbox: Any) -> None:
        self.mailboxes[request.request_id] = mailbox

    def abort(self, request_ids: Any, *, silent: bool) -> None:
        self.aborted += request_ids


def steps(request_id: str, sizes: list[int]) -> list[StepOutput]:
    """The text's tokens in steps of these sizes, each token with everything that can come with it."""
    ids, outputs, at = FakeTokenizer().encode(TEXT), [], 0
    while at < len(ids):
        new = ids[at : at + sizes[len(outputs) % len(sizes)]]
        outputs.append(
            StepOutput(
                request_id, list(new), [TokenLogprob(i, -float(at + k), (), ()) for k, i in enumerate(new)],
                [TokenSource.BONUS] * len(new), None, RequestStats(),
                hidden_states=[[float(at + k)] for k in range(len(new))],  # type: ignore[misc]
                sampling_mask=[([i], [0.0]) for i in new],
                prompt_logprobs=[TokenLogprob(1, None, (), ())] if at == 0 else None,
            )
        )  # fmt: skip
        at += len(new)
    outputs[-1].finish = FinishReason("length")
    outputs[-1].stats = RequestStats(rounds=len(outputs))
    return outputs


def told(sample: Any) -> Any:
    return (
        sample.text, sample.token_ids, sample.logprobs, sample.sources, sample.hidden, sample.mask,
        sample.prompt_logprobs, sample.finish, sample.stats,
    )  # fmt: skip


async def read(interval: int, chance: random.Random, sizes: list[int]) -> tuple[Generation, list[tuple[int, str]]]:
    """Runs two samples whose outputs come in bursts. Returns what was yielded: (new tokens, new text)."""
    client = FakeClient()
    params = SamplingParams(n=2, max_new_tokens=99, logprobs=0)
    generation = Generation(client, FakeTokenizer(), [Prompt([1], params)], {})  # type: ignore[arg-type]
    yielded = []

    async def send() -> None:
        await asyncio.sleep(0)
        queues = [steps(request_id, sizes) for request_id in client.mailboxes]
        while any(queues):
            queue = chance.choice([queue for queue in queues if queue])
            output = queue.pop(0)
            client.mailboxes[output.request_id].put((output.request_id, output))
            if chance.random() < 0.3:
                await asyncio.sleep(0)

    sender = asyncio.create_task(send())
    async for arrived in generation.arrivals(interval):
        assert len({id(sample) for sample, _ in arrived}) == len(arrived)
        for sample, output in arrived:
            new = len(output.token_ids)
            assert new >= interval or output.finish is not None or not sample.token_ids
            yielded.append((new, generation.take(sample, output).text))
    await sender
    return generation, yielded


@pytest.mark.parametrize("interval", [1, 4, 100])
@pytest.mark.parametrize("sizes", [[1], [3], [1, 5, 2]])
def test_bursts_and_intervals_change_no_content(interval: int, sizes: list[int]) -> None:
    for seed in range(10):
        generation, yielded = asyncio.run(read(interval, random.Random(seed), sizes))
        count = len(FakeTokenizer().encode(TEXT))
        assert sum(new for new, _ in yielded) == 2 * count
        for sample in generation.samples:
            assert sample.text == TEXT
            alone = steps(sample.request.request_id, [count])[0]
            assert told(sample) == (
                TEXT, alone.token_ids, alone.logprobs, alone.sources, alone.hidden_states, alone.sampling_mask,
                alone.prompt_logprobs, alone.finish, RequestStats(rounds=len(steps("", sizes))),
            )  # fmt: skip


def test_what_came_before_a_failure_is_told_first() -> None:
    async def run() -> list[int]:
        client = FakeClient()
        prompt = Prompt([1], SamplingParams(max_new_tokens=99, logprobs=0))
        generation = Generation(client, FakeTokenizer(), [prompt], {})  # type: ignore[arg-type]
        seen, arrivals = [], generation.arrivals(100)
        first = asyncio.create_task(anext(arrivals))
        await asyncio.sleep(0)
        ((request_id, mailbox),) = client.mailboxes.items()
        outputs = steps(request_id, [3])
        mailbox.put((request_id, outputs[0]))
        for sample, output in await first:
            seen.append(len(generation.take(sample, output).output.token_ids))
        mailbox.put((request_id, outputs[1]))
        mailbox.put((request_id, ApiError(503, "lost")))
        seen += [len(output.token_ids) for _, output in await anext(arrivals)]
        with pytest.raises(ApiError, match="lost"):
            await anext(arrivals)
        assert client.aborted == [request_id]
        return seen

    assert asyncio.run(run()) == [3, 3]


def test_refusals_come_as_errors_in_the_callers_words() -> None:
    async def run() -> None:
        client = FakeClient()
        generation = Generation(client, FakeTokenizer(), [Prompt([1], SamplingParams())], {"regex": "pattern"})  # type: ignore[arg-type]
        turn = asyncio.create_task(anext(generation.arrivals()))
        await asyncio.sleep(0)
        ((request_id, mailbox),) = client.mailboxes.items()
        mailbox.put((request_id, m.Refused(request_id, "regex", "does not compile")))
        with pytest.raises(ApiError, match="pattern: does not compile"):
            await turn

    asyncio.run(run())
