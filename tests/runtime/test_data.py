"""Which samples each rank reads: each sample once per epoch, at any interruption and any number of ranks."""

import itertools
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sizes import tries
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from cloudtrain_runtime import GlobalOrderSampler as PublicSampler
from cloudtrain_runtime.data import DataState, GlobalOrderSampler, Position
from cloudtrain_runtime.data.loader import make_loader
from cloudtrain_runtime.data.position import resolve_global_batch
from cloudtrain_runtime.data.samplers import EvaluationShards
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.run_context import read_context
from cloudtrain_runtime.process.seeds import IsolatedRandomState, seed_everything, seed_worker

Groups = list[GlobalOrderSampler]


def group(
    length: int,
    batch: int,
    accumulate: int,
    world: int,
    epoch: int = 0,
    start: int = 0,
    saved: DataState | None = None,
) -> Groups:
    made = []
    for rank in range(world):
        sampler = GlobalOrderSampler(
            length, batch_size=batch, accumulate=accumulate, rank=rank, world_size=world, seed=7
        )
        sampler.set_epoch(epoch, start)
        if saved is not None:
            sampler.resume(saved)
        made.append(sampler)
    return made


def global_batches(ranks: Groups) -> Iterator[list[int]]:
    """Yield the counted samples of each step in global order, and check the ranks' shares of each step."""
    loaders = [iter(rank) for rank in ranks]
    for step in zip(*(rank.schedule() for rank in ranks), strict=True):
        shares = []
        for batch, loader, rank in zip(step, loaders, ranks, strict=True):
            parts = [(micro, next(loader)) for micro in batch.micro_batches]
            assert all(len(indices) == micro.samples <= rank.batch_size for micro, indices in parts)
            shares.append([index for micro, indices in parts for index in indices[: micro.count]])
        assert len({len(batch.micro_batches) for batch in step}) == 1
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        samples = [
            index for turn in itertools.zip_longest(*shares) for index in turn if index is not None
        ]
        assert [batch.samples for batch in step] == [len(samples)] * len(ranks)
        yield samples
    assert [next(loader, None) for loader in loaders] == [None] * len(ranks)


@pytest.mark.promise
@settings(deadline=None)
@given(
    length=st.integers(1, 300),
    batch=st.integers(1, 9),
    accumulate=st.integers(1, 3),
    world=st.integers(1, 6),
    epoch=st.integers(0, 3),
)
def test_each_sample_is_used_exactly_once_in_an_epoch(
    length: int, batch: int, accumulate: int, world: int, epoch: int
) -> None:
    steps = global_batches(group(length, batch, accumulate, world, epoch))
    assert sorted(index for step in steps for index in step) == list(range(length))


Cuts = list[tuple[int, int]]
cuts = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=6)


@pytest.mark.promise
@settings(deadline=None, max_examples=tries(300))
@given(
    length=st.integers(1, 120),
    batch=st.integers(1, 5),
    accumulate=st.sampled_from([1, 3]),
    parts=cuts,
)
def test_resume_at_any_step_with_any_ranks_repeats_the_steps(
    length: int, batch: int, accumulate: int, parts: Cuts
) -> None:
    """An interrupted iterator has read ahead. Only steps that `advance` has counted are saved."""
    steps: list[list[int]] = []
    saved: DataState | None = None
    for world, count in [*parts, (1, 0)]:
        ranks = group(length, batch, accumulate, world, saved=saved)
        for _ in range(count):
            steps.append(next(global_batches(ranks)))
            for rank in ranks:
                rank.advance()
        states = {rank.state_dict().__repr__() for rank in ranks}
        assert len(states) == 1
        saved = DataState.from_json(ranks[0].state_dict())
    assert saved is not None
    expected: list[list[int]] = []
    for epoch in range(saved.epoch + 1):
        uninterrupted = group(length, batch, accumulate, parts[0][0], epoch)
        expected.extend(global_batches(uninterrupted))
    assert steps == expected[: len(steps)]
    assert saved.step == len(steps)


@settings(deadline=None)
@given(
    length=st.integers(1, 200),
    batch=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    world=st.integers(1, 5),
)
def test_the_length_equals_the_number_of_batches(
    length: int, batch: int, accumulate: int, world: int
) -> None:
    for rank in group(length, batch, accumulate, world):
        for start in range(0, length, 17):
            rank.set_epoch(1, start)
            assert len(list(rank)) == len(rank)


def test_large_batches_have_the_same_order_as_small_ones() -> None:
    length = 100_003
    ranks = group(length, 8, 1, 3)
    steps = list(global_batches(ranks))
    assert sorted(index for step in steps for index in step) == list(range(length))
    assert [index for step in steps for index in step] == [
        index for batch in group(length, 50_000, 1, 1)[0] for index in batch
    ]


def test_a_long_epoch_is_computed_lazily() -> None:
    sampler = GlobalOrderSampler(10**12, batch_size=4, rank=1_000, world_size=1024)
    sampler.set_epoch(3, 4096 * 10**8)
    assert len(next(iter(sampler))) == 4
    assert next(sampler.schedule()).samples == 4096
    assert len(sampler) == -(-(10**12 - 4096 * 10**8) // 4096)


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = {
        tuple(index for batch in sampler for index in batch)
        for seed in (0, 1)
        for epoch in (0, 1)
        for sampler in [GlobalOrderSampler(50, batch_size=5, rank=0, world_size=1, seed=seed)]
        if sampler.set_epoch(epoch) is None
    }
    assert len(orders) == 4


def test_every_rank_takes_part_in_a_small_last_step() -> None:
    ranks = group(9, 2, 1, 4)
    last = [list(rank.schedule())[-1] for rank in ranks]
    assert [batch.samples for batch in last] == [1, 1, 1, 1]
    assert [batch.micro_batches[0].count for batch in last] == [1, 0, 0, 0]
    assert all(len(batch.micro_batches) == 1 for batch in last)
    assert (
        len({tuple(list(rank)[-1]) for rank in ranks}) == 1
    )  # ranks without a sample repeat the last one


def test_shares_of_micro_steps_differ_by_at_most_one() -> None:
    saved = DataState(1, 0, 18, 18, 4, 1, 4, 7, 90)
    counts = [
        [micro.count for micro in next(rank.schedule()).micro_batches]
        for rank in group(90, 4, 1, 4, saved=saved)
    ]
    assert counts == [[3, 2], [3, 2], [2, 2], [2, 2]]


def test_evaluation_shards_cover_everything_once() -> None:
    for length, world in ((10, 4), (3, 4), (8, 1)):
        seen = [
            index
            for rank in range(world)
            for batch in EvaluationShards(
                length, batch_size=3, data_rank=rank, data_size=world, even=False
            )
            for index in batch
        ]
        assert sorted(seen) == list(range(length))


SAVED = DataState(
    step=9,
    epoch=1,
    samples=24,
    global_batch=24,
    batch_size=6,
    accumulate=2,
    world_size=2,
    seed=7,
    length=100,
)


def test_a_state_survives_json_and_invalid_json_is_rejected() -> None:
    assert DataState.from_json(SAVED.to_json()) == SAVED
    assert SAVED.position == Position(9, 1, 24)
    for broken in ({"step": 1}, {**SAVED.to_json(), "epoch": None}):
        with pytest.raises(CheckpointError, match="has no valid position in the data"):
            DataState.from_json(broken)


UNEVEN = (
    "the global batch stays at 24 samples with 5 ranks instead of 2; it is not divisible, so ranks' shares differ by "
    "one sample"
)
LONGER = (
    "the global batch stays at 24 samples with 1 rank instead of 2; a step takes 4 micro-steps, so that none exceeds 6 "
    "samples"
)


@pytest.mark.parametrize(
    ("saved", "now", "size", "message"),
    [
        (None, (6, 2, 2), 24, None),
        (SAVED, (6, 2, 2), 24, None),
        (SAVED, (6, 2, 4), 24, "the global batch stays at 24 samples with 4 ranks instead of 2"),
        (SAVED, (6, 2, 5), 24, UNEVEN),
        (SAVED, (6, 2, 1), 24, LONGER),
        (SAVED, (6, 3, 2), 36, "the global batch was 24 samples and is 36 from step 9 on"),
        (SAVED, (3, 2, 4), 24, None),
        (replace(SAVED, world_size=5), (6, 2, 5), 24, None),
    ],
)
def test_the_global_batch_stays_unless_the_job_changes_it(
    saved: DataState | None, now: tuple[int, int, int], size: int, message: str | None
) -> None:
    assert resolve_global_batch(saved, *now) == (size, message)


def sampler_of(length: int = 100, seed: int = 7) -> GlobalOrderSampler:
    return GlobalOrderSampler(length, batch_size=6, accumulate=2, rank=0, world_size=2, seed=seed)


def test_another_dataset_length_within_an_epoch_is_rejected() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"has 120 samples and had 100 .*, 24 samples into epoch 1: .*Resume with",
    ):
        sampler_of(120).resume(SAVED)
    at_start = sampler_of(120)
    (note,) = at_start.resume(replace(SAVED, samples=0))
    assert note.startswith("warning: the training data has 120 samples and had 100 when")
    assert note.endswith("; epoch 1 begins with the present ones")
    assert at_start.length == 120


def test_another_order_version_within_an_epoch_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="with another order of samples"):
        sampler_of().resume(replace(SAVED, order=0))
    assert (
        "samples have another order" in sampler_of().resume(replace(SAVED, order=0, samples=0))[0]
    )


def test_another_seed_takes_effect_in_the_next_epoch() -> None:
    before, now = sampler_of(seed=7), sampler_of(seed=8)
    before.set_epoch(1, 24)
    assert now.resume(SAVED) == [
        "warning: the seed was 7 and is 8: it orders the samples from epoch 2 on"
    ]
    assert list(now) == list(before)
    again = sampler_of(seed=8)  # interrupted once more in the same epoch
    now.advance()
    assert now.state().seed == 7
    again.resume(now.state())
    assert list(again) == list(now)
    again.set_epoch(2)
    other = sampler_of(seed=8)
    other.set_epoch(2)
    assert list(again) == list(other)
    assert sampler_of(seed=8).resume(replace(SAVED, samples=0)) == [
        "warning: the seed was 7 and is 8: it orders the samples from epoch 1 on"
    ]


def test_a_dataset_without_samples_is_rejected() -> None:
    with pytest.raises(ValueError, match="must be at least 1; they are 0, 6 and 2"):
        sampler_of(0)


class Indices(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_script_reads_each_sample_once(workers: int, accumulate: int) -> None:
    """Run two epochs in attempts of three steps, alternately with three and two ranks, whose loaders read ahead."""
    length, seen, state, steps = 61, [], None, 0
    options: dict[str, Any] = {"prefetch_factor": 4, "persistent_workers": True} if workers else {}
    for world in itertools.cycle((3, 2)):
        ranks = [
            PublicSampler(length, batch_size=4, accumulate=accumulate, rank=rank, world_size=world)
            for rank in range(world)
        ]
        loaders = [
            DataLoader(Indices(length), batch_sampler=rank, num_workers=workers, **options)
            for rank in ranks
        ]
        done = 0
        for rank in ranks:
            rank.load_state_dict(state) if state else None
        while ranks[0].epoch < 2 and done < 3:
            batches = [iter(loader) for loader in loaders]
            for plans in zip(*(rank.schedule() for rank in ranks), strict=True):
                for rank, loaded, plan in zip(ranks, batches, plans, strict=True):
                    for micro in plan.micro_batches:
                        seen += [
                            (rank.epoch, index) for index in next(loaded).tolist()[: micro.count]
                        ]
                for rank in ranks:
                    rank.advance()
                done += 1
                if done == 3:
                    break
        steps += done
        state = ranks[1].state_dict()
        if state["epoch"] == 2:
            break
    assert sorted(seen) == [(epoch, index) for epoch in range(2) for index in range(length)]
    assert state["step"] == steps


def test_set_epoch_works_as_in_distributed_sampler() -> None:
    sampler = PublicSampler(
        20, batch_size=5
    )  # rank and world size come from the environment: one process
    loader = DataLoader(Indices(20), batch_sampler=sampler)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(loader) == 4
        for batch in loader:
            seen.append(tuple(batch.tolist()))
            sampler.advance()
    assert len(set(seen)) == 8
    assert (sampler.step, sampler.epoch) == (8, 2)
    sampler.advance()
    sampler.set_epoch(2)  # the present epoch: its position is kept
    assert sampler.position == Position(9, 2, 5)


class Noisy(Indices):
    def __getitem__(self, index: int) -> tuple[int, float]:  # type: ignore[override]
        return index, float(torch.rand(()))


def test_augmentation_in_workers_depends_on_the_batch_alone() -> None:
    """It depends neither on the worker that loads the batch nor on the position where the epoch was resumed."""
    context = replace(read_context({}), seed=3)

    def drawn(workers: int, epoch: int, start: int) -> dict[int, float]:
        sampler = GlobalOrderSampler(40, batch_size=5, rank=0, world_size=1)
        sampler.set_epoch(epoch, start)
        loader = make_loader(Noisy(40), sampler, lambda samples: samples, context, workers=workers)
        return dict(sample for batch in loader for sample in batch)

    complete = drawn(2, 0, 0)
    assert len(set(complete.values())) == 40
    rest = drawn(1, 0, 15)
    assert rest == {index: value for index, value in complete.items() if index in rest}
    assert len(rest) == 25
    assert set(drawn(2, 1, 0).values()).isdisjoint(complete.values())


def test_a_worker_is_seeded_as_any_process() -> None:
    """The seeds of workers decide augmentations, which a resumed run repeats."""
    states = []
    for seed in (seed_everything, seed_worker):
        seed(2**40 + 7)
        states.append((torch.rand(3).tolist(), random.getstate(), np.random.rand(3).tolist()))  # noqa: NPY002
    assert states[0] == states[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gathers_tensors_as_it_collates(workers: int) -> None:
    tensors = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    part = Subset(TensorDataset(*tensors), [5, 1, -2, 0])
    chosen: Any = [[0, 2], [3, 1], [2]]
    loader = make_loader(part, chosen, default_collate, read_context({}), workers=workers)
    batches = list(loader)
    loader.close()
    expected = [default_collate([part[at] for at in each]) for each in chosen]
    assert str(batches) == str(expected)


@pytest.mark.parametrize("seed", [0, 1, 77, 2**32 - 1, 2**40 + 7])
def test_isolated_numbers_are_those_of_the_libraries(seed: int) -> None:
    with IsolatedRandomState(seed):
        drawn = torch.rand(3).tolist(), random.random(), np.random.rand(1000).tolist()  # noqa: NPY002, S311
    known = np.random.RandomState(np.random.MT19937(seed % 2**32))
    own = torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()
    assert drawn == (own, random.Random(seed).random(), known.rand(1000).tolist())  # noqa: S311


def test_numpys_generator_can_be_copied_and_spawned_inside() -> None:
    with IsolatedRandomState(3):
        bits = np.random.get_bit_generator()
        copied = pickle.loads(pickle.dumps(bits))  # noqa: S301 (of this process)
        assert np.array_equal(copied.random_raw(700), np.random.MT19937(3).random_raw(700))
        spawned = [each.generate_state(8).tolist() for each in bits.seed_seq.spawn(2)]
    known = np.random.SeedSequence(3).spawn(2)
    assert spawned == [each.generate_state(8).tolist() for each in known]
