"""The workloads: data as promised, shards that share out an epoch, and training that learns."""

import hashlib
import itertools
import re

import pytest
import torch

from thinwire.workloads import WORKLOADS, Images, Text, Workload, data, workload

SMALL = [
    Images(batch_size=8, per_class=20, test_per_class=5, width=4),
    Text(batch_size=8, context=32, test_windows=64, width=32, layers=1, heads=2),
]
small = pytest.mark.parametrize("task", SMALL, ids=lambda task: task.name)


@pytest.fixture(autouse=True)
def one_thread(two_threads: None) -> None:
    torch.set_num_threads(1)


def take(task: Workload, count: int, **shard: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(itertools.islice(task.batches(**shard), count))


def train(task: Workload, steps: int, seed: int = 0) -> tuple[torch.nn.Module, list[float]]:
    model = task.model(seed)
    optimizer = task.optimizer(model)
    schedule = task.schedule(optimizer, steps)
    losses = []
    for batch in take(task, steps, seed=seed):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model, losses


def test_parts_of_a_model_are_sharded_but_for_small_ones() -> None:
    images, text = Images(), Text(width=32, layers=3, heads=2)
    model = images.model()
    assert images.shards(model) == [model[3], model[7]]
    transformer = text.model()
    assert text.shards(transformer) == list(transformer.blocks)


@pytest.mark.parametrize("name", data.SHA256)
def test_files_are_those_of_their_readme(name: str) -> None:
    folder = data.resources.files("thinwire.workloads") / "data"
    row = re.search(
        rf"`{re.escape(name)}\.zst` \| ([\d,]+) \| `(\w+)` \| `(\w+)`",
        (folder / "README.md").read_text(encoding="utf-8"),
    )
    assert row, f"data/README.md has no row for {name}"
    stored = (folder / f"{name}.zst").read_bytes()
    assert f"{len(stored):,}" == row[1]
    assert hashlib.sha256(stored).hexdigest() == row[2]
    assert hashlib.sha256(data.read(name)).hexdigest() == row[3] == data.SHA256[name]


def test_a_damaged_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(data.SHA256, "moby-dick.txt", "0" * 64)
    with pytest.raises(ValueError, match=r"moby-dick.txt: SHA-256 must be 0+, got 3a19.* install"):
        data.read("moby-dick.txt")


def test_pictures_are_balanced_and_different() -> None:
    train, test = data.pictures()
    assert train.shape == (10, 1200, 28, 28)
    assert test.shape == (10, 300, 28, 28)
    assert train.dtype == test.dtype == torch.uint8
    seen = {picture.numpy().tobytes() for picture in train.flatten(0, 1)}
    assert not any(picture.numpy().tobytes() in seen for picture in test.flatten(0, 1))


def test_pictures_are_normalised() -> None:
    inputs, targets = Images().epoch(torch.Generator())
    assert inputs.shape == (12_000, 1, 28, 28)
    assert torch.bincount(targets).tolist() == [1200] * 10
    # MEAN and STD are given with three digits, so they are wrong by up to 0.0005 / 0.353 = 0.0014.
    assert abs(inputs.mean().item()) < 0.002
    assert abs(inputs.std().item() - 1) < 0.003


def test_the_book_is_whole() -> None:
    train, test, alphabet = data.book()
    assert (len(train), len(test), len(alphabet)) == (1_091_681, 121_298, 89)
    text = "".join(alphabet[number] for number in torch.cat([train, test]).tolist())
    assert text.encode() == data.read("moby-dick.txt")
    assert re.findall(r"^CHAPTER (\d+)\.", text, re.M) == [str(n) for n in range(1, 136)]
    assert set(test.tolist()) <= set(train.tolist())


def test_sizes_of_the_models() -> None:
    sizes = {
        name: sum(weights.numel() for weights in workload(name).model().parameters())
        for name in WORKLOADS
    }
    assert sizes == {"images": 421_642, "text": 427_865}
    # A buffer would have to be sent, too, or would differ between ranks.
    assert not any(list(workload(name).model().buffers()) for name in WORKLOADS)


@small
def test_a_step_takes_the_same_samples_for_any_number_of_ranks(task: Workload) -> None:
    whole = type(task)(**{**vars(task), "batch_size": 4 * task.batch_size})
    steps = 9  # of Images this is more than an epoch, which has 6
    ranks = [take(task, steps, rank=rank, world=4, seed=5) for rank in range(4)]
    for parts, batch in zip(zip(*ranks, strict=True), take(whole, steps, seed=5), strict=True):
        assert torch.equal(torch.cat([inputs for inputs, _ in parts]), batch[0])
        assert torch.equal(torch.cat([targets for _, targets in parts]), batch[1])


def test_shards_are_disjoint_and_an_epoch_uses_all() -> None:
    task = Images(batch_size=10)
    known = {p.numpy().tobytes(): n for n, p in enumerate(task.epoch(torch.Generator())[0])}
    assert len(known) == 12_000
    steps = 12_000 // (10 * 3)
    shards = [
        {known[p.numpy().tobytes()] for b in take(task, steps, rank=r, world=3) for p in b[0]}
        for r in range(3)
    ]
    assert [len(shard) for shard in shards] == [4000] * 3
    assert len(set().union(*shards)) == 12_000


def test_windows_are_side_by_side_and_targets_follow() -> None:
    inputs, targets = Text(context=32).epoch(torch.Generator().manual_seed(1))
    train = data.book().train.long()
    start = next(
        s for s in range(32) if torch.equal(train[s : s + inputs.numel()], inputs.flatten())
    )
    assert len(inputs) == (len(train) - start - 1) // 32
    assert torch.equal(train[start + 1 : start + 1 + targets.numel()], targets.flatten())


@small
def test_everything_follows_from_the_seed(task: Workload) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    runs = [train(task, 5, seed) for seed in (3, 3, 4)]
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator was touched"
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model, _ in runs]
    assert torch.equal(weights[0], weights[1])
    assert runs[0][1] == runs[1][1]
    assert not torch.equal(weights[0], weights[2])
    assert task.evaluate(runs[0][0]) == task.evaluate(runs[1][0])


@small
def test_evaluation_leaves_the_model_as_it_was(task: Workload) -> None:
    model = task.model()
    for mode in (True, False):
        model.train(mode)
        task.evaluate(model)
        assert model.training is mode
        assert torch.is_grad_enabled()


@small
def test_training_learns(task: Workload) -> None:
    model, losses = train(task, 60)
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < 0.8 * first
    before, after = task.evaluate(task.model()), task.evaluate(model)
    assert (after > before) is task.higher_is_better
    assert after != before


@small
def test_learning_rate_rises_to_the_top_and_falls_to_zero(task: Workload) -> None:
    optimizer = task.optimizer(task.model())
    schedule = task.schedule(optimizer, 100)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    top = rates.index(max(rates))
    assert rates[top] == pytest.approx(task.learning_rate)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[-1] < 0.1 * task.learning_rate
    assert schedule.get_last_lr() == [0.0]


@pytest.mark.parametrize(
    ("task", "shard", "message"),
    [
        (Images(), {"rank": 4, "world": 4}, r"rank must be in \[0, world\), got rank 4 of 4"),
        (Images(), {"rank": 0, "world": 0}, r"rank must be in \[0, world\), got rank 0 of 0"),
        (Images(batch_size=0), {}, "batch_size must be at least 1, got 0"),
        (Images(per_class=2), {"world": 4}, "4 ranks with batches of 32 need 128 samples, .* 20"),
    ],
)
def test_impossible_shards_are_refused(task: Workload, shard: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(task.batches(**shard))


def test_workloads_by_name() -> None:
    assert workload("images") == Images()
    assert workload("text") == Text()
    with pytest.raises(ValueError, match="unknown workload 'audio'; workloads: images, text"):
        workload("audio")
