"""The peer's own HTTP test kits, unmodified, against us under every draft."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import peer_kits
import peer_shim
import pytest
from serving import running_server

pytestmark = [pytest.mark.model, pytest.mark.long]

RUNNER = Path(__file__).parent / "peer_kits.py"
FLAGS = ("--enable-return-hidden-states", "--max-total-tokens", "98304")
NO_DRAFT = [kit for kit in peer_kits.KITS if not kit.startswith("Spec")]  # without a draft there is nothing to count
NO_DRAFT += ["SpecLogprobKit", "SpecPenaltyKit", "SpecFeatureKit", "SpecHiddenStatesKit", "SpecSamplingMaskKit"]


def run_kits(url: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(RUNNER), "--url", url, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("the peer's wheel cannot be fetched")
    print(done.stdout)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(failed) or done.stderr[-2000:]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("draft", ["ngram", "dflash", "dspark"])
def test_all_kits_pass_with_a_draft(draft: str) -> None:
    if peer_shim.fetch() is None:
        pytest.skip("the peer's wheel cannot be fetched")
    with running_server(*FLAGS, "--draft", draft) as server, running_server() as plain:
        run_kits(server.url, "--reference", plain.url)


@pytest.mark.timeout(7200)
def test_all_kits_pass_without_a_draft() -> None:
    if peer_shim.fetch() is None:
        pytest.skip("the peer's wheel cannot be fetched")
    with running_server(*FLAGS) as server:
        run_kits(server.url, "--kits", ",".join(NO_DRAFT))
