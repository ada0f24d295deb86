"""`exactspec demo`: one answer streamed with logprobs and accepted blocks, then timed with and without the draft."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from exactspec.errors import ExactSpecError

if TYPE_CHECKING:
    from rich.text import Text

    from exactspec.engine.llm import StreamChunk
    from exactspec.text.tokenizer import Tokenizer

QUESTION = "A baker sells 14 loaves in the morning and twice as many in the afternoon. How many loaves is that in all?"
STYLES = {"accepted": "green", "correction": "yellow", "bonus": "cyan", "plain": "white"}


def demo(
    question: Annotated[str, typer.Argument(help="What to ask.")] = QUESTION,
    model: Annotated[str, typer.Option(help="Target.")] = "smollm2-135m",
    draft: Annotated[str, typer.Option(help="Draft.")] = "dspark",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 160,
) -> None:
    """Show tokens as they come, how each came, its logprob, and the speed-up over plain decoding."""
    from rich.console import Console

    from exactspec.bench.compare import compare
    from exactspec.bench.contenders import EngineContender
    from exactspec.bench.exactness import run_requests
    from exactspec.engine.llm import LLM
    from exactspec.types import Request, SamplingParams

    console = Console(highlight=False)
    llm = LLM(model, draft=draft, kv_tokens=8192)
    ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    console.print(f"[bold]{model}[/] with draft [bold]{draft}[/]:", end=" ")
    console.print(f"{question}\n", markup=False)
    console.print(
        "one line per round: [green]accepted draft[/], [yellow]correction[/], [cyan]bonus[/]; logprob in nats\n"
    )
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, logprobs=0)
    chunks = []
    for chunk in llm.stream(ids, params):
        console.print(_line(chunk, llm.tokenizer))
        chunks.append(chunk)
    console.print(f"\naccept length {chunks[-1].stats.accept_length:.2f} tokens per round (bonus included)")
    entries = [entry for chunk in chunks for entry in chunk.logprobs or []]
    contenders = [EngineContender(name, llm.engine.target, batch=1) for name in ("plain", draft)]
    plainly = run_requests(contenders[0].engine, [Request("plain", tuple(ids), params, seed=0)])["plain"]
    if plainly.logprobs != entries:
        raise ExactSpecError("the answer without drafts differs from the one with them: this should not happen")
    console.print("decoded again without drafts: the same tokens, the same logprobs as floats")
    plain, fast = compare(contenders, [[ids]] * 3, new_tokens=128, temperature=0.0)
    speed_up = fast.tokens_per_second / plain.tokens_per_second
    console.print(
        f"plain {plain.tokens_per_second:.0f} tokens/s, with draft {fast.tokens_per_second:.0f} tokens/s: "
        f"[bold]{speed_up:.2f} times as fast[/]"
    )


def _line(chunk: StreamChunk, tokenizer: Tokenizer) -> Text:
    from rich.text import Text

    line = Text()
    for entry, source in zip(chunk.logprobs or [], chunk.sources, strict=True):
        token = tokenizer.decode([entry.token_id], skip_special_tokens=False)
        line.append(repr(token)[1:-1], style=STYLES[source.value])
        line.append(f" {entry.logprob:.2f}  ", style="dim")
    return line
