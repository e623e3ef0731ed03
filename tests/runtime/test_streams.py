"""Streams: each sample once per epoch, after any interruption, with any number of ranks and workers."""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sizes import tries
from support.streams import Found, Reading, read_by_ranks
from torch.utils.data import IterableDataset, default_collate

from cloudtrain_runtime import FileStream
from cloudtrain_runtime.data import DataState, Feeder, Loading, make_evaluation_data, make_feeder
from cloudtrain_runtime.data.file_stream import FileSource
from cloudtrain_runtime.data.iterable_dataset import IterableSource
from cloudtrain_runtime.data.position import ReaderShare
from cloudtrain_runtime.errors import CheckpointError, TaskError
from cloudtrain_runtime.process.run_context import read_context
from cloudtrain_runtime.process.seeds import seed_everything

# Torch warns if there are more workers than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CONTEXT = replace(read_context({}), seed=3)


def read(path: Path) -> Iterator[tuple[int, float]]:
    """Yield the numbers of a file, each with a random value as an augmentation."""
    for line in path.read_text().split():
        yield int(line), float(torch.rand(()))


def read_numbers(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


def write_files(folder: Path, sizes: list[int]) -> int:
    """Write files of consecutive numbers; return the count of all numbers."""
    folder.mkdir(exist_ok=True)
    first = 0
    for index, size in enumerate(sizes):
        (folder / f"part-{index:03d}").write_text("\n".join(map(str, range(first, first + size))))
        first += size
    return first


def feeder_of(dataset: Any, **changes: Any) -> Feeder:
    options = {"batch_size": 6, "accumulate": 2, "seed": 5, **changes}
    return make_feeder(dataset, CONTEXT, ReaderShare(0, 1), Loading(list, **options))


def steps_of(feeder: Feeder, limit: int | None = None) -> list[list[Any]]:
    """Take the remaining steps of an epoch, at most `limit`; return the samples of each step."""
    steps = []
    for step in itertools.islice(feeder.epoch(), limit):
        batches = list(step)
        assert step.plan.samples == sum(micro.count for micro, _ in batches)
        assert all(micro.count == len(batch) for micro, batch in batches)
        steps.append([sample for _, batch in batches for sample in batch])
        feeder.advance()
    return steps


def saved_by(feeder: Feeder) -> DataState:
    return DataState.from_json(json.loads(json.dumps(feeder.state().to_json())))


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("shuffle", [0, 7])
def test_resume_repeats_batches_and_augmentations(
    shuffle: int, workers: int, tmp_path: Path
) -> None:
    count = write_files(tmp_path, [0, 31, 5, 17, 40, 1, 22, 9, 9])
    stream = FileStream(tmp_path, read, shuffle=shuffle, lanes=4)
    feeder = feeder_of(stream, workers=workers)
    uninterrupted = [steps_of(feeder) for _ in range(3)]
    assert feeder.position.epoch == 3
    for epoch in uninterrupted:
        assert sorted(number for step in epoch for number, _ in step) == list(range(count))
    assert uninterrupted[0] != uninterrupted[1]
    resumed: list[Any] = []
    feeder = feeder_of(stream, workers=workers)
    while feeder.position.epoch < 3:
        resumed += steps_of(feeder, 4)
        saved = saved_by(feeder)
        feeder = feeder_of(stream, workers=workers)
        assert feeder.resume(saved) == []
        assert feeder.position == saved.position
    assert resumed == [step for epoch in uninterrupted for step in epoch]


def draw(path: Path) -> Iterator[tuple[int, float, float, float]]:
    """Yield the numbers of a file, each with a random value of torch, Python and NumPy."""
    for number in read_numbers(path):
        yield number, float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002, S311


GOLDEN = {
    0: ([36, 94, 93, 53, 37, 95, 31, 54, 38, 96, 32, 55], (54, 0.071952, 0.642283, 0.759905)),
    7: ([41, 95, 34, 59, 40, 98, 35, 55, 36, 100, 32, 53], (55, 0.840681, 0.442444, 0.350036)),
    1500: ([41, 108, 34, 59, 47, 115, 35, 83, 10, 109, 32, 88], (83, 0.440009, 0.121879, 0.824299)),
}
"""The first step by the size of the shuffle, and one of its samples. Older runs resume in the middle of such an epoch."""


@pytest.mark.parametrize("shuffle", GOLDEN)
def test_the_samples_and_their_random_numbers_never_change(shuffle: int, tmp_path: Path) -> None:
    write_files(tmp_path, [0, 31, 5, 17, 40, 1, 22, 9, 9])
    (step,) = steps_of(feeder_of(FileStream(tmp_path, draw, shuffle=shuffle, lanes=4)), 1)
    numbers, sample = GOLDEN[shuffle]
    assert [number for number, *_ in step] == numbers
    assert step[7] == pytest.approx(sample, abs=1e-6)


@pytest.mark.parametrize("collate", [list, default_collate])
@pytest.mark.parametrize("shuffle", [0, 8])
def test_reading_ahead_does_not_change_the_random_states(
    shuffle: int, collate: Any, tmp_path: Path
) -> None:
    write_files(tmp_path, [30, 30])
    stream = FileStream(tmp_path, draw, shuffle=shuffle, lanes=2)
    loading = Loading(collate, batch_size=6)
    seed_everything(0)
    for step in make_feeder(stream, CONTEXT, ReaderShare(0, 1), loading).epoch():
        list(step)
    after = float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002, S311
    seed_everything(0)
    assert after == (float(torch.rand(())), random.random(), float(np.random.rand()))  # noqa: NPY002, S311


def test_a_stream_lists_visible_files_wherever_they_are(tmp_path: Path) -> None:
    write_files(tmp_path / "a", [3, 4])
    (tmp_path / "a" / ".hidden").write_text("99")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "more").write_text("7 8")
    for files, expected in (
        (tmp_path, range(9)),
        (str(tmp_path / "*" / "part-*"), range(7)),
        ([tmp_path / "b" / "more"], (7, 8)),
    ):
        assert sorted(FileStream(files, read_numbers)) == list(expected)
    moved = tmp_path.with_name("moved")
    before = FileStream(tmp_path, read_numbers).fingerprint
    tmp_path.rename(moved)
    assert FileStream(moved, read_numbers).fingerprint == before
    (moved / "b" / "another").write_text("9")
    assert FileStream(moved, read_numbers).fingerprint != before


def test_other_files_within_an_epoch_are_rejected(tmp_path: Path) -> None:
    write_files(tmp_path, [20, 20])
    feeder = feeder_of(FileStream(tmp_path, read_numbers))
    steps_of(feeder, 1)
    middle = saved_by(feeder)
    steps_of(feeder)
    end = saved_by(feeder)
    (tmp_path / "another").write_text("1 2 3")
    with pytest.raises(
        CheckpointError, match=r"had other files \(2 files and has 3\).*Resume with"
    ):
        feeder_of(FileStream(tmp_path, read_numbers)).resume(middle)
    assert feeder_of(FileStream(tmp_path, read_numbers)).resume(end) == []
    with pytest.raises(CheckpointError, match="in the middle of an epoch of a FileStream"):
        feeder_of(Counting(40)).resume(middle)
    with pytest.raises(CheckpointError, match="of a dataset with a length"):
        feeder_of(FileStream(tmp_path, read_numbers)).resume(replace(middle, stream=None))


def test_changed_lanes_or_shuffle_apply_from_the_next_epoch(tmp_path: Path) -> None:
    count = write_files(tmp_path, [20, 21, 22, 23])
    before = feeder_of(FileStream(tmp_path, read_numbers, lanes=4, shuffle=9))
    used = steps_of(before, 2)
    after = feeder_of(FileStream(tmp_path, read_numbers, lanes=2))
    after.resume(saved_by(before))
    used += steps_of(after)
    assert sorted(itertools.chain(*used)) == list(range(count))
    assert sorted(itertools.chain(*steps_of(after))) == list(range(count))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda folder: FileStream(folder / "none", read_numbers), "there are no files in"),
        (lambda folder: FileStream([], read_numbers), "there are no files in"),
        (lambda folder: FileStream(folder, read_numbers, lanes=0), "lanes must be at least 1"),
        (
            lambda folder: steps_of(feeder_of(FileStream(folder, lambda path: None))),
            "part-000; it returned a NoneType",
        ),
        (lambda folder: steps_of(feeder_of(FileStream(folder, lambda path: []))), "has no samples"),
    ],
)
def test_an_unreadable_stream_is_an_error_with_a_reason(
    make: Any, match: str, tmp_path: Path
) -> None:
    write_files(tmp_path, [3])
    with pytest.raises(TaskError, match=match):
        make(tmp_path)


def test_unused_workers_and_ranks_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path, [8, 8])
    assert len(steps_of(feeder_of(FileStream(tmp_path, read_numbers), workers=3))) == 2
    assert "FileStream: each rank uses 2 of 3 workers" in capfd.readouterr().out
    note = FileSource(FileStream(tmp_path, read_numbers), ReaderShare(0, 3)).note
    assert note is not None
    assert "2 files for 3 ranks" in note


def take_steps(opened: list[Any], sources: list[Any], steps: int, batch: int) -> list[int]:
    """Take steps on every rank; return the used samples. Then read one more batch that is not used."""
    used: list[int] = []
    for _ in range(steps):
        for reader, source in zip(opened, sources, strict=True):
            if samples := reader.take(batch):
                used += samples
                source.advance(reader.marks())
    for reader in opened:
        reader.take(batch)
    return used


@settings(
    deadline=None,
    max_examples=tries(150),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    lanes=st.integers(1, 8),
    shuffle=st.integers(0, 6),
    batch=st.integers(1, 5),
    parts=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=5
    ),
)
def test_files_are_used_exactly_once_by_any_ranks_and_workers(
    sizes: list[int],
    lanes: int,
    shuffle: int,
    batch: int,
    parts: list[tuple[int, int, int]],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "-".join(map(str, sizes))
    count = write_files(folder, sizes)
    stream = FileStream(folder, read_numbers, lanes=lanes, shuffle=shuffle)
    used: list[int] = []
    state: dict[str, Any] | None = None
    for ranks, workers, steps in [*parts, (1, 1, count + 1)]:
        sources = [FileSource(stream, ReaderShare(rank, ranks)) for rank in range(ranks)]
        opened: list[Any] = []
        for source in sources:
            if state is not None:
                source.resume(json.loads(json.dumps(state)), 0, ranks)
            opened += [source.open(5, 2, role, workers) for role in range(workers)]
        used += take_steps(
            opened, [source for source in sources for _ in range(workers)], steps, batch
        )
        state = sources[0].global_state([source.own_state() for source in sources])
    assert sorted(used) == list(range(count))
    assert len(json.dumps(state)) < 200 + 20 * lanes


def test_any_number_of_ranks_gives_equal_steps_in_full_lanes(tmp_path: Path) -> None:
    write_files(tmp_path, [40] * 8)
    stream = FileStream(tmp_path, read_numbers, lanes=8)

    def steps(ranks: int) -> list[set[int]]:
        opened = [
            FileSource(stream, ReaderShare(rank, ranks)).open(5, 0, 0, 1) for rank in range(ranks)
        ]
        return [
            {sample for reader in opened for sample in reader.take(16 // ranks)} for _ in range(20)
        ]

    assert steps(1) == steps(2) == steps(4) == steps(8)


class Counting(IterableDataset[int]):
    """Numbers in a random order that differs in each epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        assert self.epoch >= 0
        yield from torch.randperm(self.length).tolist()


class Stateful(IterableDataset[int]):
    """Numbers in order, with a state that holds the position. `yielded` counts the samples that were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.position = self.yielded = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[int]:
        while self.position < self.length:
            self.position += 1
            self.yielded += 1
            yield self.position - 1
        self.position = 0


@settings(deadline=None, max_examples=tries(100))
@given(
    length=st.integers(1, 80),
    batch=st.integers(1, 4),
    parts=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=5),
    kind=st.sampled_from([Counting, Stateful]),
)
def test_iterables_are_used_exactly_once_by_any_ranks(
    length: int, batch: int, parts: list[tuple[int, int]], kind: type[Any]
) -> None:
    used: list[int] = []
    state: dict[str, Any] | None = None
    size = 1
    for ranks, steps in [*parts, (1, length)]:
        if len(used) == length:
            break  # a finished epoch is not resumed
        sources = [
            IterableSource(kind(length), ReaderShare(rank, ranks), batch * ranks)
            for rank in range(ranks)
        ]
        for source in sources:
            if state is not None:
                source.resume(json.loads(json.dumps(state)), len(used), size)
        used += take_steps(
            [source.open(5, 0, 0, 1) for source in sources], list(sources), steps, batch
        )
        state, size = sources[0].global_state([source.own_state() for source in sources]), ranks
    assert sorted(used) == list(range(length))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_without_a_state_skips_used_samples(
    workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    feeder = feeder_of(Counting(50), workers=workers)
    uninterrupted = [steps_of(feeder) for _ in range(2)]
    assert uninterrupted[0] != uninterrupted[1]
    assert all(sorted(itertools.chain(*epoch)) == list(range(50)) for epoch in uninterrupted)
    before = feeder_of(Counting(50), workers=workers)
    used = steps_of(before) + steps_of(before, 2)
    after = feeder_of(Counting(50), workers=workers)
    (note,) = after.resume(saved_by(before))
    assert note.endswith("without load_state_dict: 24 samples are skipped")
    assert used + steps_of(after) == uninterrupted[0] + uninterrupted[1]
    assert ("each rank uses 1 of 2 workers" in capfd.readouterr().out) == (workers == 2)


def test_an_iterable_with_a_state_resumes_at_its_position() -> None:
    before = feeder_of(Stateful(50))
    used = steps_of(before, 2)
    dataset = Stateful(50)
    after = feeder_of(dataset)
    assert after.resume(saved_by(before)) == []
    used += steps_of(after)
    assert list(itertools.chain(*used)) == list(range(50))
    assert dataset.yielded == 50 - 24
    assert len(steps_of(after)) == 5


def test_an_iterables_state_must_be_json() -> None:
    class Opaque(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"position": torch.zeros(1)}

    feeder = feeder_of(Opaque(50))
    steps_of(feeder, 1)
    with pytest.raises(TaskError, match=r"Opaque.state_dict\(\) must return JSON values"):
        feeder.state()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_can_be_repeated(workers: int, tmp_path: Path) -> None:
    count = write_files(tmp_path, [5, 6, 7])
    loading = Loading(list, batch_size=4, workers=workers)
    evaluation = make_evaluation_data(
        FileStream(tmp_path, read_numbers), CONTEXT, ReaderShare(0, 1), loading, even=True
    )
    for _ in range(3):
        samples = [sample for micro, batch in evaluation for sample in batch[: micro.count]]
        assert sorted(samples) == list(range(count))
        assert evaluation.samples == count


def check_steps(found: Found) -> None:
    """Check that the ranks agree on how many samples each step has."""
    assert found.failures == []
    assert all(state == found.states[0] for state in found.states)
    for step in found.steps:
        assert {samples for _, samples in step} == {sum(len(used) for used, _ in step)}


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "shuffle"), [(0, 0), (2, 5)])
def test_ranks_without_samples_take_part_in_each_step(
    workers: int, shuffle: int, tmp_path: Path
) -> None:
    """Read two epochs with 2, 3, 2 and 1 ranks, interrupted within both epochs, from files of very uneven lengths."""
    count = write_files(tmp_path / "files", [50, 3, 1, 20, 0, 7, 11])
    used: list[int] = []
    saved = None
    for ranks, steps in ((2, 4), (3, 3), (2, 4), (1, None)):
        found = read_by_ranks(
            Reading(
                ranks,
                tmp_path / "read",
                files=tmp_path / "files",
                steps=steps,
                epochs=2,
                workers=workers,
                saved=saved,
                shuffle=shuffle,
            )
        )
        check_steps(found)
        used += found.used
        saved = found.states[0]
        assert sorted(sample for own, _ in found.evaluated for sample in own) == sorted(
            list(range(count)) * 2
        )
        assert len({batches for _, batches in found.evaluated}) == 1
    assert sorted(used) == sorted(list(range(count)) * 2)
    assert saved is not None
    assert saved["epoch"] == 2


@pytest.mark.processes
def test_ranks_share_an_iterable_in_its_own_order(tmp_path: Path) -> None:
    single = read_by_ranks(Reading(1, tmp_path / "one", length=61))
    order = [sample for step in single.steps for used, _ in step for sample in used]
    found = read_by_ranks(Reading(3, tmp_path / "three", length=61, steps=2))
    check_steps(found)
    rest = read_by_ranks(Reading(2, tmp_path / "two", length=61, saved=found.states[0]))
    check_steps(rest)
    assert sorted(order) == sorted(found.used + rest.used) == list(range(61))
    assert [{sample for used, _ in step for sample in used} for step in found.steps] == [
        set(order[:18]),
        set(order[18:36]),
    ]


@pytest.mark.processes
def test_shares_that_several_ranks_read_count_once(tmp_path: Path) -> None:
    """With tensor parallelism ranks 0 and 1 read the first share of the samples, ranks 2 and 3 the second share."""
    count = write_files(tmp_path / "files", [9, 10, 11, 2])
    found = read_by_ranks(Reading(4, tmp_path / "read", files=tmp_path / "files", copies=2))
    assert found.failures == []
    for step in found.steps:
        assert step[0] == step[1]
        assert step[2] == step[3]
        assert step[0][1] == len(step[0][0]) + len(step[2][0])
    assert found.used == sorted(list(range(count)) * 2)


@pytest.mark.processes
def test_hosts_share_their_own_files_among_their_ranks(tmp_path: Path) -> None:
    for host, numbers in enumerate((range(30), range(30, 47))):
        (tmp_path / "files" / f"host-{host}").mkdir(parents=True)
        for file in range(3):
            name = tmp_path / "files" / f"host-{host}" / f"part-{file}"
            name.write_text(" ".join(map(str, list(numbers)[file::3])))
    reading = Reading(4, tmp_path / "read", files=tmp_path / "files", hosts=2)
    first = read_by_ranks(replace(reading, steps=1))
    check_steps(first)
    rest = read_by_ranks(replace(reading, saved=first.states[0]))
    check_steps(rest)
    assert sorted(first.used + rest.used) == list(range(47))
    for step in [*first.steps, *rest.steps]:
        assert all(sample < 30 for used, _ in step[:2] for sample in used)
        assert all(sample >= 30 for used, _ in step[2:] for sample in used)
    fewer = read_by_ranks(
        replace(reading, hosts=1, saved=first.states[0], files=tmp_path / "files" / "host-0")
    )
    assert len(fewer.failures) == 4
    assert "divided among 2 instances, and there are 1 now" in fewer.failures[0]
    across = read_by_ranks(replace(reading, copies=4))
    assert "are on several hosts" in across.failures[0]
