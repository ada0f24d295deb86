"""Muon for matrices, AdamW for the rest, one learning-rate shape for both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exactspec.draft.block_model import BlockModel
from exactspec.train.options import Recipe

_NS_STEPS = 5
_NS = (3.4445, -4.7750, 2.0315)  # quintic Newton-Schulz coefficients of Muon (Jordan et al., 2024)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: each matrix's update has all singular values near 1.

    Matrices of one shape are handled as one batch. Update scale max(1, rows / columns) ** 0.5, Nesterov momentum.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for shape, params in by_shape.items():
                grads = torch.stack([param.grad for param in params])  # type: ignore[misc]
                buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
                torch._foreach_mul_(buffers, group["momentum"])
                torch._foreach_add_(buffers, list(grads.unbind()))
                update = orthogonalise(grads.add(torch.stack(buffers), alpha=group["momentum"]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_add_(params, list(update.unbind()), alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor) -> Tensor:
    """[n, r, c] -> the nearest semi-orthogonal matrices, roughly (singular values in about 0.7 .. 1.2)."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _NS
    for _ in range(_NS_STEPS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).to(matrices.dtype)


class Optimizers:
    """Both optimizers behind one `step`. Learning rates follow `rate(progress)`."""

    def __init__(self, model: BlockModel, recipe: Recipe) -> None:
        matrices, markov, rest = [], [], []
        for name, param in model.named_parameters():
            if name.startswith("markov_head.markov_w"):
                markov.append(param)
            elif param.dim() == 2 and (name.startswith("layers.") or name == "fc.weight"):
                matrices.append(param)
            else:
                rest.append(param)
        self.params = [*matrices, *markov, *rest]
        self.recipe = recipe
        groups = [{"params": rest, "lr": recipe.adam_lr}]
        if markov:
            groups.append({"params": markov, "lr": recipe.adam_lr * recipe.markov_lr_scale})
        cuda = self.params[0].is_cuda
        self.muon = Muon(matrices, recipe.muon_lr)
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)
        self._peaks = [[g["lr"] for g in optimizer.param_groups] for optimizer in (self.muon, self.adam)]

    def rate(self, step: int, progress: float) -> float:
        """Share of the peak rate: warm-up over the first steps, then linear in progress (0 .. 1) to zero."""
        warm = min(1.0, (step + 1) / max(1, self.recipe.warmup_steps))
        start = min(0.5, self.recipe.warmup_steps / max(1, self.recipe.steps))
        return warm * min(1.0, max(0.0, (1.0 - progress) / (1.0 - start)))

    def step(self, rate: float) -> Tensor:
        """Clips the gradients, applies them, drops them; returns the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.params, self.recipe.clip)
        for optimizer, peaks in zip((self.muon, self.adam), self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def state_tensors(self) -> dict[str, Tensor]:
        """All state as named tensors, in parameter order."""
        tensors = {}
        for title, optimizer in (("muon", self.muon), ("adam", self.adam)):
            for number, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    tensors[f"{title}.{number}.{key}"] = torch.as_tensor(value)
        return tensors

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        for title, optimizer in (("muon", self.muon), ("adam", self.adam)):
            content = optimizer.state_dict()
            states: dict[int, dict[str, Tensor]] = defaultdict(dict)
            for name, value in tensors.items():
                owner, number, key = name.split(".")
                if owner == title:
                    states[int(number)][key] = value
            optimizer.load_state_dict({"state": dict(states), "param_groups": content["param_groups"]})
