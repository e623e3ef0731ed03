from hypothesis import given
from hypothesis import strategies as st

from cloudtrain_runtime.data import GlobalOrderSampler, ShardSampler


def samplers(length: int, batch: int, accumulate: int, world: int, epoch: int, start: int) -> list[GlobalOrderSampler]:
    made = []
    for rank in range(world):
        sampler = GlobalOrderSampler(
            length, batch_size=batch, accumulate=accumulate, rank=rank, world_size=world, seed=7
        )
        sampler.set_epoch(epoch, start)
        made.append(sampler)
    return made


def global_batches(ranks: list[GlobalOrderSampler]) -> list[list[int]]:
    """Return the counted samples of each step over all ranks, sorted."""
    steps = zip(*(list(rank.schedule()) for rank in ranks), strict=True)
    return [
        sorted(index for batch in step for micro in batch.micro_batches for index in micro.indices[: micro.count])
        for step in steps
    ]


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
    steps = global_batches(samplers(length, batch, accumulate, world, epoch, 0))
    assert sorted(index for step in steps for index in step) == list(range(length))


@given(length=st.integers(1, 300), batch=st.integers(1, 4), world=st.sampled_from([1, 2, 3, 6]), data=st.data())
def test_an_epoch_goes_on_where_it_stopped_at_any_world_size(
    length: int, batch: int, world: int, data: st.DataObject
) -> None:
    whole = global_batches(samplers(length, batch * 6 // world if world > 1 else batch * 6, 1, world, 2, 0))
    done = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.sampled_from([1, 2, 3, 6]))
    rest = global_batches(samplers(length, batch * 6 // other, 1, other, 2, sum(map(len, whole[:done]))))
    assert rest == whole[done:]


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = {
        tuple(index for batch in sampler for index in batch)
        for seed in (0, 1)
        for epoch in (0, 1)
        for sampler in [GlobalOrderSampler(50, batch_size=5, accumulate=1, rank=0, world_size=1, seed=seed)]
        if sampler.set_epoch(epoch) is None
    }
    assert len(orders) == 4


def test_every_rank_takes_part_in_a_last_step_that_is_too_small() -> None:
    ranks = samplers(9, 2, 1, 4, 0, 0)
    last = [list(rank.schedule())[-1] for rank in ranks]
    assert [batch.samples for batch in last] == [1, 1, 1, 1]
    assert [batch.micro_batches[0].count for batch in last] == [1, 0, 0, 0]
    assert all(len(batch.micro_batches) == 1 for batch in last)


def test_the_loader_sees_as_many_batches_as_the_schedule() -> None:
    for rank in samplers(23, 3, 2, 2, 0, 6):
        assert len(list(rank)) == len(rank)


def test_evaluation_shards_cover_everything_once() -> None:
    for length, world in ((10, 4), (3, 4), (8, 1)):
        seen = [
            index
            for rank in range(world)
            for batch in ShardSampler(length, batch_size=3, rank=rank, world_size=world)
            for index in batch
        ]
        assert sorted(seen) == list(range(length))
