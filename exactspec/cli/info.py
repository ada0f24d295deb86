"""`exactspec info`: what this machine offers, and what a model is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from exactspec.cli import options as opt

if TYPE_CHECKING:
    from exactspec.backend.base import Backend


def info(
    model: Annotated[
        str | None, typer.Argument(help="Alias, folder, GGUF file or hub id; none: the machine only.")
    ] = None,
    draft: opt.Draft = "none",
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
) -> None:
    """Versions, backend and supported families; with a model, its shape, memory and stop tokens. Fetches aliases."""
    import torch
    import transformers
    from rich.console import Console
    from rich.table import Table

    import exactspec
    from exactspec.backend.select import select_backend
    from exactspec.model.config import SUPPORTED
    from exactspec.model.hub import ALIASES

    table = Table(show_header=False, box=None)
    backend = select_backend(device, dtype, "exact")
    table.add_row("exactspec", exactspec.__version__)
    table.add_row("torch / transformers", f"{torch.__version__} / {transformers.__version__}")
    table.add_row("backend", f"{backend.name} on {backend.device}{_kernels(backend)}")
    table.add_row("supported", SUPPORTED)
    table.add_row("aliases", ", ".join(f"{name}: {alias.title}" for name, alias in sorted(ALIASES.items())))
    if model is not None:
        from exactspec.draft.factory import make_drafter
        from exactspec.engine.build import kv_bytes_per_token
        from exactspec.model.loader import load_target
        from exactspec.model.target import TargetModel

        loaded = load_target(model, dtype=dtype, device=backend.device)
        target = TargetModel(backend, loaded)
        spec = target.spec
        table.add_row("model", target.name)
        table.add_row("layers x hidden", f"{spec.num_layers} x {spec.hidden_size}")
        table.add_row("heads / KV heads x dim", f"{spec.num_heads} / {spec.num_kv_heads} x {spec.head_dim}")
        table.add_row("vocabulary", f"{target.config.vocab_size} ({target.tokenizer.vocab_size} in the tokenizer)")
        table.add_row("context length", str(target.config.context_length))
        table.add_row("dtype", str(target.dtype).removeprefix("torch."))
        table.add_row("K/V bytes per token", str(kv_bytes_per_token(target)))
        table.add_row("stop tokens", ", ".join(str(i) for i in sorted(target.eos_ids)))
        drafter = make_drafter(draft, target, num_slots=64, gamma=None, backend=backend)
        table.add_row("draft", f"{draft}, gamma {drafter.gamma}, reads layers {list(drafter.capture_layers)}")
    Console().print(table)


def _kernels(backend: Backend) -> str:
    """What the native CPU kernels were compiled for, where they run."""
    instructions = getattr(backend, "instruction_set", None)
    return f", {instructions} kernels" if instructions else ""
