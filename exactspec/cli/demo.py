"""`exactspec demo`: one answer streamed with logprobs and accepted blocks, then timed with and without the draft."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

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
    from exactspec.engine.llm import LLM
    from exactspec.types import SamplingParams

    console = Console(highlight=False)
    llm = LLM(model, draft=draft, kv_tokens=8192)
    ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    console.print(f"[bold]{model}[/] with draft [bold]{draft}[/]:", end=" ")
    console.print(f"{question}\n", markup=False)
    console.print(
        "one line per round: [green]accepted draft[/], [yellow]correction[/], [cyan]bonus[/]; logprob in nats\n"
    )
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, logprobs=0)
    last: Any = None
    for chunk in llm.stream(ids, params):
        console.print(_line(chunk, llm.tokenizer))
        last = chunk
    target = llm.engine.target
    console.print(f"\naccept length {last.stats.accept_length:.2f} tokens per round (bonus included)")
    contenders = [EngineContender(name, target, batch=1) for name in ("plain", draft)]
    plain, fast = compare(contenders, [[ids]] * 3, new_tokens=128, temperature=0.0)
    _show_speed(console, plain, fast)


def _show_speed(console: Any, plain: Any, fast: Any) -> None:
    speed_up = fast.tokens_per_second / plain.tokens_per_second
    console.print(
        f"plain {plain.tokens_per_second:.0f} tokens/s, with draft {fast.tokens_per_second:.0f} tokens/s: "
        f"[bold]{speed_up:.2f} times as fast[/], same tokens, same logprobs"
    )


def _line(chunk: Any, tokenizer: Any) -> Any:
    from rich.text import Text

    line = Text()
    for entry, source in zip(chunk.logprobs or [], chunk.sources, strict=True):
        token = tokenizer.decode([entry.token_id], skip_special_tokens=False)
        line.append(repr(token)[1:-1], style=STYLES[source.value])
        value = entry.logprob if math.isfinite(entry.logprob) else float("-inf")
        line.append(f" {value:.2f}  ", style="dim")
    return line
