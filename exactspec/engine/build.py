"""From settings to a running engine: loads the target, sizes the pool, makes the drafter and the verify policy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from exactspec.backend.parallel import SINGLE, Parallel
from exactspec.backend.select import select_backend
from exactspec.draft.base import Drafter
from exactspec.draft.factory import make_drafter
from exactspec.draft.simulate import SimulatedAcceptance
from exactspec.engine.config import EngineConfig
from exactspec.engine.engine import Engine
from exactspec.engine.live_costs import LiveCosts
from exactspec.engine.profile import load_or_measure
from exactspec.engine.verify_policy import AcceptByDecree, VerifyAll, VerifyByConfidence, VerifyPolicy
from exactspec.errors import ConfigError, DeviceError
from exactspec.model.loader import load_target
from exactspec.model.target import TargetModel

KV_MEMORY_SHARE = 0.3  # of free memory, when kv_tokens is not given
MOST_DEFAULT_KV_TOKENS = 65536


def build_engine(config: EngineConfig) -> Engine:
    """Raises ConfigError, CheckpointError or DeviceError when the parts do not fit; nothing is substituted silently.

    With tensor_parallel over 1 the other ranks are processes of their own, which `Engine.close` ends.
    """
    if config.tensor_parallel > 1:
        from exactspec.engine.ranks import launch

        return launch(config, build_rank)
    return build_rank(config)


def build_rank(
    config: EngineConfig, parallel: Parallel = SINGLE, make_engine: Callable[..., Engine] = Engine
) -> Engine:
    """The engine of one rank; `make_engine` has the arguments of Engine."""
    backend = select_backend(config.device, config.dtype, config.numerics, parallel)
    loaded = load_target(
        config.model, dtype=config.dtype, context_length=config.context_length, device=backend.device, parallel=parallel
    )
    target = TargetModel(backend, loaded)
    loaded.release_layers()
    kv_tokens = config.kv_tokens or parallel.least(default_kv_tokens(target))
    return assemble(config, target, -(-kv_tokens // config.page_size), make_engine)


def assemble(
    config: EngineConfig, target: TargetModel, num_pages: int, make_engine: Callable[..., Engine] = Engine
) -> Engine:
    """An engine around a target that is loaded already (several engines may share one)."""
    num_slots = num_pages * config.page_size
    try:
        drafter = make_drafter(
            config.draft,
            target,
            num_slots=num_slots,
            gamma=config.gamma,
            backend=target.backend,
            end_ids=target.eos_ids,
        )
        if num_slots < drafter.gamma + 2:
            raise ConfigError(f"kv_tokens: {num_slots} cannot hold one block of {drafter.gamma + 1} rows")
        return make_engine(config, target, drafter, num_pages, make_policy(config, target, drafter, num_pages))
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise DeviceError(
            f"kv_tokens: a pool of {num_slots} tokens ({num_slots * kv_bytes_per_token(target) / 1e9:.1f} GB, and the "
            f"draft's) does not fit the memory of {target.backend.device}: {error}"
        ) from error


def make_policy(config: EngineConfig, target: TargetModel, drafter: Drafter, num_pages: int) -> VerifyPolicy:
    """The verify policy that the settings ask for."""
    policy: VerifyPolicy = VerifyAll(config.acceptance)
    if config.verify == "confidence" and drafter.gamma:
        costs = load_or_measure(
            target,
            drafter,
            str(config.draft),
            max_requests=config.max_running_requests,
            num_slots=num_pages * config.page_size,
        )
        together = target.backend.parallel.size > 1  # ranks must plan alike, and each has a clock of its own
        policy = VerifyByConfidence(config.acceptance, drafter.gamma, LiveCosts(costs, fixed=together))
    if config.simulate_accept_length is not None:
        simulated = SimulatedAcceptance(config.simulate_accept_length, drafter.gamma, config.seed)
        policy = AcceptByDecree(policy, simulated)
    return policy


def default_kv_tokens(target: TargetModel) -> int:
    """A share of the free memory, at least one full context, at most MOST_DEFAULT_KV_TOKENS."""
    affordable = int(_free_memory(target.backend.device) * KV_MEMORY_SHARE) // kv_bytes_per_token(target)
    return max(min(affordable, MOST_DEFAULT_KV_TOKENS), min(target.config.context_length, 4096) + 64)


def kv_bytes_per_token(target: TargetModel) -> int:
    """Of the target's pool."""
    spec = target.spec
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * target.dtype.itemsize


def _free_memory(device: torch.device) -> int:
    """Free bytes on the device; for the CPU, what the kernel says can be used without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: fall through to a modest figure
    return 4 << 30
