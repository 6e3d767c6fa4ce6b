"""A dry run of the GPU path without a GPU, on fake tensors: they have a shape and a device, no values.

Fake tensors refuse to mix devices, so a tensor that the code leaves on the CPU ends in an error here.
"""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import data
import eval as evaluation
import train
from model import Encoder


@contextlib.contextmanager
def fake_tensors():
    """The order of augment's colour changes is a fixed one: the values of a fake one cannot be read."""
    order = lambda n, generator=None: SimpleNamespace(tolist=lambda: list(range(n)))
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", order)
        yield


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("flags", ["cifar10 --buffer 200", "cifar10 --plasticity supcon --stability ird --amp",
                                   "tinyimagenet --amp"])
@pytest.mark.filterwarnings("ignore:CUDA is not available")     # autocast turns itself off on a fake GPU
def test_a_step_at_full_size(flags, device, monkeypatch):
    """Backward needs a real GPU: on "cuda" the step stops at the loss, on "cpu" it runs to its end."""
    c = train.parse(["--dataset", *flags.split()])
    table, N, S = data.DATASETS[c.dataset], c.batch_size, c.image_size
    if device == "cuda":
        monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)
    with fake_tensors():
        with torch.device(device):                              # what `train` puts there, not the step
            net, teacher = Encoder(c.width, c.dim), Encoder(c.width, c.dim).requires_grad_(False)
            images, labels = torch.zeros(N, 3, S, S, dtype=torch.uint8), torch.zeros(N, dtype=torch.long)
            prototypes, mean, std = torch.zeros(table["classes"], c.dim), torch.zeros(3), torch.ones(3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        x = data.augment(images.repeat(2, 1, 1, 1), mean=mean, std=std, crop=table["crop"], blur=table["blur"])
        out = train.train_step(net, teacher, optimizer, x, labels.repeat(2), prototypes=prototypes, old=2, seen=4,
                               alpha=0.5, c=c)
    assert x.shape == (2 * N, 3, S, S) and out.shape == (3,) and x.device.type == out.device.type == device
    assert device == "cuda" or all(p.grad.shape == p.shape for p in net.parameters())


def test_encoding():
    with fake_tensors():
        with torch.device("cuda"):
            net, images = Encoder(64, 128).eval(), torch.zeros(600, 3, 32, 32, dtype=torch.uint8)
        more = evaluation.more_images(images, None)
        h = evaluation.encode(net.joined, more, lambda x: data.normalise(x, [0.5] * 3, [0.2] * 3))
    assert h.shape == (1800, 1024) and h.device.type == "cuda"


@pytest.mark.skipif(torch.__version__.startswith("2.10."), reason="torch 2.10 cannot gather fake tensors")
def test_the_embeddings_of_two_processes(monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        monkeypatch.setattr(train, "WORLD", 2), monkeypatch.setattr(train, "RANK", 1)
        with fake_tensors():
            z = train.gather(torch.zeros(512, 128, device="cuda", requires_grad=True))
    finally:
        torch.distributed.destroy_process_group()
    assert z.shape == (1024, 128) and z.device.type == "cuda" and z.requires_grad
