"""The peer's own HTTP test kits against us under every draft; peer_kits.py says which prompts and seeds it sets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import peer_shim
import pytest
from serving import running_server

pytestmark = pytest.mark.model
RUNNER = Path(__file__).parent / "peer_kits.py"
FLAGS = ("--enable-return-hidden-states", "--max-total-tokens", "98304")
QUICK = (
    "BasicAPIContractMixin", "JSONModeMixin.test_json_mode_with_streaming", "JSONConstrainedMixin.test_json_generate",
    "JSONConstrainedMixin.test_json_invalid", "RegexConstrainedMixin.test_regex_generate_custom_log_format",
    "EBNFConstrainedMixin.test_ebnf_generate_phone", "MatchedStopMixin", "SpecGrammarKit", "SpecSamplingMaskKit",
    "SpecHiddenStatesKit", "SpecLogprobKit.test_logprob_start_len", "SpecLogprobKit.test_logprob_decode_match_prefill",
    "SpecLogprobKit.test_token_ids_logprob_ragged", "SpecCorrectnessKit.test_first_token_finish",
    "SpecCorrectnessKit.test_batch_generation", "SpecFeatureKit.test_constrained_decoding",
)  # fmt: skip


def run_kits(url: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(RUNNER), "--url", url, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("the peer's wheel cannot be fetched")
    print(done.stdout)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(failed) or done.stderr[-2000:]


def test_quick_ones() -> None:
    if not peer_shim.is_here():
        pytest.skip("the peer's wheel is not here: run tests/e2e/peer_shim.py")
    with running_server(*FLAGS, "--draft", "dspark") as server:
        run_kits(server.url, "--kits", ",".join(QUICK))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("draft", ["none", "ngram", "dflash", "dspark"])
def test_all_of_them(draft: str) -> None:
    """With `none` named, every round is one row: the kits count rounds there, too."""
    if peer_shim.fetch() is None:
        pytest.skip("the peer's wheel cannot be fetched")
    with running_server(*FLAGS, "--draft", draft) as server, running_server() as plain:
        run_kits(server.url, "--reference", plain.url)
