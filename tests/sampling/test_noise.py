"""Seeds, streams and the shared noise rows."""

import contextlib

import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling.row_fakes import HashBackend

from exactspec.sampling.noise import NoiseCache, NoiseStream, round_seed, round_seeds
from exactspec.sampling.seeds import fresh_seed, sample_seed

SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(seed=SEEDS)
def test_samples_of_a_request_have_seeds_of_their_own(seed):
    seeds = [sample_seed(seed, index) for index in range(50)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 50
    assert all(-(2**63) <= s < 2**63 for s in seeds)
    assert seeds == [sample_seed(seed, index) for index in range(50)]


@given(seed=SEEDS, positions=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20, unique=True))
def test_the_drafts_own_noise_has_another_seed_in_every_round(seed, positions):
    seeds = [round_seed(seed, position) for position in positions]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= s < 2**63 for s in seeds)
    assert round_seeds(torch.tensor([seed] * len(positions)), torch.tensor(positions)).tolist() == seeds


def test_neighbouring_seeds_share_no_samples():
    seeds = [sample_seed(seed, index) for seed in (*range(20), 2**31, 2**63 - 1, -1) for index in range(20)]
    assert len(set(seeds)) == len(seeds)


def test_fresh_seeds_differ_and_are_valid():
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100  # false alarm: about 5e-16
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_rows_drawn_by_the_draft_are_not_made_again():
    backend = HashBackend()
    noise = NoiseCache(backend, 50, capacity=16)
    draft = noise.rows([7, 7, 7, 9, 9, 9], [4, 5, 6, 0, 1, 2]).clone()
    assert backend.rows_made == 6
    verify = noise.rows([7, 7, 7, 7, 9, 9, 9, 9], [4, 5, 6, 7, 0, 1, 2, 3])
    assert backend.rows_made == 8
    assert torch.equal(verify[[0, 1, 2, 4, 5, 6]], draft)
    noise.rows([7], [4], NoiseStream.DRAFT)
    assert backend.rows_made == 9


pairs = st.lists(
    st.tuples(st.sampled_from([0, -1, 2**63 - 1, -(2**63), 5]), st.integers(0, 4)), min_size=1, max_size=12
)


@given(calls=st.lists(st.tuples(pairs, st.sampled_from(list(NoiseStream))), max_size=12), capacity=st.integers(1, 9))
def test_the_cache_never_changes_a_number_nor_grows(calls, capacity):
    backend = HashBackend()
    noise = NoiseCache(backend, 6, 5, capacity)
    for asked, stream in calls:
        seeds, positions = zip(*asked, strict=True)
        got = noise.rows(seeds, positions, stream)
        wanted = backend.gumbel(torch.tensor(seeds), torch.tensor(positions), stream, 5)
        assert torch.equal(got[:, :5], wanted)
        assert (got[:, 5:] == -torch.inf).all()
        assert noise._buffer is None or noise._buffer.shape == (capacity, 6)
        assert len(noise._slots) <= capacity


def test_tensors_are_taken_as_well():
    noise = NoiseCache(HashBackend(), 8)
    assert torch.equal(noise.rows(torch.tensor([3]), torch.tensor([4])), noise.rows([3], [4]))
    assert noise.rows([], []).shape == (0, 8)


@given(data=st.data(), capacity=st.integers(2, 6))
def test_rows_that_an_error_kept_from_being_made_are_made_later(data, capacity):
    backend, truth = HashBackend(), HashBackend()
    noise = NoiseCache(backend, 6, 5, capacity)
    make = backend.gumbel
    for _ in range(data.draw(st.integers(1, 6))):
        positions = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=capacity))
        seeds = [3] * len(positions)
        if data.draw(st.booleans()):
            backend.gumbel = lambda *_: 1 // 0
            with contextlib.suppress(ZeroDivisionError):
                noise.rows(seeds, positions)
            backend.gumbel = make
        got = noise.rows(seeds, positions)
        assert torch.equal(got[:, :5], truth.gumbel(torch.tensor(seeds), torch.tensor(positions), 0, 5))
