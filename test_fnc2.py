"""Tests of the mathematics, the protocol and the commands. Oracles are plain loops of the equations, in float64."""

import contextlib
import functools
import io
import itertools
import json
import math
import os
import pickle
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchvision
import torchvision.transforms.functional as TF
from PIL import Image

import data
import eval as evaluation
import train
from buffer import ReservoirBuffer
from etf import simplex_etf
from losses import fnc2_loss, hsd_alpha, hsd_loss, ird_loss, sprd_loss, supcon_loss
from model import Encoder, frozen_copy

ROOT, CPU, PLAIN = Path(__file__).parent, torch.device("cpu"), dict(mean=(0, 0, 0), std=(1, 1, 1))
ENV = dict(os.environ, OMP_NUM_THREADS=str(torch.get_num_threads()), PYTHONPATH=str(ROOT))     # of other processes
TINY = ("--limit-per-class 6 --width 8 --image-size 8 --batch-size 8 --epochs-first 2 --epochs 2 --dim 16 "
        "--lr 0.01 --device cpu").split()
LABELS = torch.tensor([2, 3, 2, 3, 3, 2, 0, 1, 2])              # classes 0 and 1 have a single view
ALL, Y, P = LABELS >= 0, torch.arange(16), simplex_etf(4, 8)


def unit(n, d, seed=0, dtype=torch.float64):
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=1)


def few_shapes(root):
    """As data.load_shapes, with 20 training and 10 test images of each class."""
    train_y, test_y = (torch.arange(10).repeat_interleave(count) for count in (20, 10))
    return data.draw_shapes(train_y, 0), train_y, data.draw_shapes(test_y, 1), test_y, list(data.SHAPES)


data.LOADERS["shapes"] = functools.cache(few_shapes)


# ---------------------------------------------------------------------------- prototypes and losses, against loops

@pytest.mark.parametrize("K, d", [(2, 1), (2, 8), (10, 128), (129, 128), (200, 256)])
def test_prototypes_are_a_simplex_etf_up_to_d_plus_1_and_depend_on_the_seed_alone(K, d):
    p = simplex_etf(K, d, seed=3)
    wanted = torch.full((K, K), -1 / (K - 1)).fill_diagonal_(1)                         # Eq. 2
    assert p.shape == (K, d) and (p @ p.T - wanted).abs().max() < 1e-6
    torch.manual_seed(K)
    assert torch.equal(p, simplex_etf(K, d, seed=3)) and (d == 1 or not torch.equal(p, simplex_etf(K, d, seed=4)))
    with pytest.raises(ValueError):
        simplex_etf(d + 2, d)


def loop_contrastive(z, y, anchors, tau, gamma=0, p=None, old=()):
    """FNC2; with p None and gamma 0 SupCon."""
    e, total = lambda a, b: math.exp(float(a @ b) / tau), 0.0
    for i in (i for i in range(len(z)) if anchors[i]):
        others = [k for k in range(len(z)) if k != i]
        D = sum(e(z[i], z[k]) for k in others) + sum(e(z[i], q) for q in old)
        c = [e(z[i], z[j]) / D for j in others if y[j] == y[i]] + ([] if p is None else [e(z[i], p[y[i]]) / D])
        total -= sum(max(0.0, 1 - x) ** gamma * math.log(x) for x in c) / max(len(c), 1)
    return total / len(z)                                       # over all views: the others count 0


def loop_distil(z, z_past, keys, keys_past, t_current, t_past, skip_self):
    total = 0.0
    for i in range(len(z)):
        ks = [k for k in range(len(keys)) if not (skip_self and k == i)]
        now, past = ([math.exp(float(x[i] @ rows[k]) / t) for k in ks] for x, rows, t in
                     ((z, keys, t_current), (z_past, keys_past, t_past)))
        total -= sum(a / sum(past) * math.log(b / sum(now)) for a, b in zip(past, now))
    return total / len(z)


@pytest.mark.parametrize("gamma, tau", [*itertools.product((0, 0.5, 1, 3.7), (0.1, 0.5))])
def test_fnc2_and_supcon_equal_their_equations(gamma, tau):
    z, p, equal = unit(9, 6), simplex_etf(5, 6).double(), functools.partial(pytest.approx, rel=1e-10)
    for anchors in (ALL, LABELS >= 2, LABELS <= 2):
        given = None if anchors is ALL else anchors
        for old in (0, 2):
            value = fnc2_loss(z, LABELS, p, p[:old] if old else None, given, tau=tau, gamma=gamma)
            assert value.item() == equal(loop_contrastive(z, LABELS, anchors, tau, gamma, p, p[:old]))
        assert supcon_loss(z, LABELS, given, tau=tau).item() == equal(loop_contrastive(z, LABELS, anchors, tau))
    z, y = p[2:4], torch.tensor([2, 3])                         # opposite views, each at its prototype: r exceeds 1
    assert fnc2_loss(z, y, p, tau=tau, gamma=gamma).item() == equal(loop_contrastive(z, y, ALL, tau, gamma, p))
    for label in (-1, 5):
        with pytest.raises(IndexError):                         # no such prototype
            fnc2_loss(z, y * 0 + label, p, tau=tau, gamma=gamma)


@pytest.mark.parametrize("past", [0.05, 0.5])
def test_distillation_and_alpha_equal_their_equations(past):
    z, z_past, p = unit(8, 6, 1), unit(8, 6, 2), simplex_etf(4, 6).double()
    ird = ird_loss(z, z_past, kappa_current=0.2, kappa_past=past)
    assert ird.item() == pytest.approx(loop_distil(z, z_past, z, z_past, 0.2, past, True), rel=1e-10)
    sprd = sprd_loss(z, z_past, p, zeta_current=0.3, zeta_past=past)
    assert sprd.item() == pytest.approx(loop_distil(z, z_past, p, p, 0.3, past, False), rel=1e-10)
    for alpha in (0.0, 0.3, 1.0):
        hsd = hsd_loss(z, z_past, p, alpha, kappa_current=0.2, kappa_past=past, zeta_current=0.3, zeta_past=past)
        assert hsd.item() == pytest.approx((1 - alpha) * ird.item() + alpha * sprd.item(), rel=1e-12)
    assert [hsd_alpha(e, 100, 30) for e in (1, 30, 31, 65, 100)] == [0, 0, 0.01, 0.35, 0.7]


def all_losses(z, z_past, y, p, gamma=1.5, kappa=0.2, past=0.05, tau=0.5):
    return (fnc2_loss(z, y, p, p[:2], y >= 2, tau=tau, gamma=gamma), supcon_loss(z, y, y >= 2, tau=tau),
            hsd_loss(z, z_past, p, 0.4, kappa_current=kappa, kappa_past=past, zeta_current=kappa, zeta_past=past))


@pytest.mark.parametrize("gamma", [0.5, 4])
def test_first_and_second_derivatives_torch_func_vmap_and_one_graph(gamma):
    z, z_past, p, y = unit(6, 5), unit(6, 5, 1), simplex_etf(4, 5).double(), torch.tensor([2, 2, 3, 3, 0, 2])
    w, total = z.clone().requires_grad_(), lambda w: sum(all_losses(w, z_past, y, p, gamma))
    assert torch.autograd.gradcheck(total, w) and torch.autograd.gradgradcheck(total, w)
    assert torch.allclose(torch.func.grad(total)(z), torch.autograd.grad(total(w), w)[0], rtol=1e-12)
    both, labels = torch.stack([z, z_past]), torch.stack([y, y.flip(0)])
    many = torch.func.vmap(lambda w, y: fnc2_loss(w, y, p, p[:2], tau=0.5, gamma=gamma))(both, labels)
    wanted = [loop_contrastive(a, b, ALL, 0.5, gamma, p, p[:2]) for a, b in zip(both, labels)]
    assert many.tolist() == pytest.approx(wanted, rel=1e-10)
    assert torch.allclose(torch.compile(total, fullgraph=True, backend="aot_eager")(z), total(z), rtol=1e-10)


@pytest.mark.parametrize("gamma", [0, 0.3, 1, 4])
@pytest.mark.parametrize("z, y, tau", [
    pytest.param(P[:1].repeat(16, 1), Y % 4, 0.5, id="collapsed"),
    pytest.param(P[Y % 2 + 2], Y % 2 + 2, 0.01, id="two clusters"),
    pytest.param(unit(16, 8).float(), Y * 0 + 2, 0.5, id="one class"),
    pytest.param(P[Y[:2] * 0 + 2], Y[:2] * 0 + 2, 0.01, id="c = 1"),
    pytest.param(P[2:4], Y[2:4], 0.05, id="r above 1"),
    pytest.param(unit(16, 8).float(), Y % 2, 0.5, id="no anchor"),
    pytest.param(unit(16, 8).bfloat16(), Y % 4, 0.5, id="bfloat16")])
def test_losses_and_gradients_are_finite_at_extremes_and_the_same_under_autocast(z, y, tau, gamma):
    for z_past in (z, unit(len(z), 8, 5, torch.float32)):
        results = []
        for autocast in (False, True):
            w = z.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                values = all_losses(w, z_past, y, P, gamma, kappa=0.01, past=0.01, tau=tau)
            sum(values).backward()
            results.append((*values, w.grad))
        assert all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(*results)), results
        assert all(loss.dtype == torch.float32 for loss in values)


# ---------------------------------------------------------------------------- network, buffer, data

def test_encoder_is_resnet18_at_width_64_and_its_outputs():
    backbone, theirs = (sum(p.numel() for name, p in net.named_parameters() if not name.startswith(("projector", "fc")))
                        for net in (Encoder(64, 128), torchvision.models.resnet18()))
    assert backbone == theirs - 64 * 3 * (49 - 9)               # a stem of 3x3, not of 7x7
    net, x = Encoder(4, 16).eval(), torch.randn(5, 3, 16, 16)
    assert torch.allclose(net(x).norm(dim=1), torch.ones(5)) and (net(x) < 0).any() and net(x).shape == (5, 16)
    assert net.joined(x).shape == (5, 64) and torch.equal(net.joined(x)[:, -32:], net.features(x))
    assert torch.equal(net.joined(x)[:, :4], net.stem(x).mean((2, 3)))
    assert torch.allclose(torch.compile(net, fullgraph=True, backend="eager")(x), net(x), atol=1e-5)


def test_the_teacher_normalises_by_the_batch_and_never_changes():
    net, x = Encoder(8, 8).eval(), torch.randn(4, 3, 8, 8)
    teacher = frozen_copy(net)
    before = {k: v.clone() for k, v in teacher.state_dict().items() if "num_batches" not in k}
    assert torch.equal(teacher(x), net.train()(x)) and not teacher(x).requires_grad
    assert all(torch.equal(v, teacher.state_dict()[k]) for k, v in before.items())
    z, z_past, p = (unit(6, 5, s).requires_grad_() for s in range(3))
    hsd_loss(z, z_past, p, 0.5, kappa_current=0.2, kappa_past=0.05, zeta_current=0.2, zeta_past=0.05).backward()
    assert z.grad is not None and z_past.grad is None


def test_reservoir_keeps_every_image_of_the_stream_with_equal_probability():
    kept = torch.zeros(9)
    for seed in range(1500):
        buffer = ReservoirBuffer(3, seed)
        for part in torch.arange(9).split([4, 1, 4]):           # tasks of different size
            buffer.add(part.byte()[:, None], part)
        assert len(buffer) == 3 and torch.equal(buffer.images[:, 0].long(), buffer.labels)
        kept[buffer.labels] += 1
    assert ((kept - 500) ** 2 / (1500 * 1 / 3 * 2 / 3)).sum() < 25      # chi-square of 9 cells: p = 0.002


def test_shapes_tasks_and_validation_images():
    labels = torch.arange(10).repeat(60)
    images = data.draw_shapes(labels, 0)
    assert torch.equal(images, data.draw_shapes(labels, 0)) and not torch.equal(images, data.draw_shapes(labels, 1))
    for name, value in zip(("std", "mean"), torch.std_mean(images / 255, (0, 2, 3))):
        assert torch.allclose(value, torch.tensor(data.DATASETS["shapes"][name]), atol=0.03)
    d, other = (data.load("shapes", val_fraction=0.1, limit_per_class=7, seed=seed) for seed in (1, 2))
    images, labels = data.task_images(d, 2)
    assert sorted(set(labels.tolist())) == d.tasks[1] == [2, 3] and torch.equal(images, d.train_images[14:28])
    assert torch.bincount(d.val_labels).tolist() == [2] * 10 and torch.bincount(d.train_labels).tolist() == [7] * 10
    val, rest = ({image.numpy().tobytes() for image in images} for images in (d.val_images, d.train_images))
    assert not val & rest and not torch.equal(d.val_images, other.val_images)
    assert data.split_tasks(200, 10)[9] == list(range(180, 200))


def test_crops_and_flips_are_torchvisions():
    torch.manual_seed(0)
    image, area = torch.zeros(3, 32, 32), (0.2, 1.0)
    ours = data.crop_boxes(torch.rand(3000, 22), 32, area)      # top, left, height, width
    draw = torchvision.transforms.RandomResizedCrop.get_params
    theirs = torch.tensor([draw(image, area, (3 / 4, 4 / 3)) for _ in range(3000)]).float()
    below = lambda x, at: torch.searchsorted(x.sort().values, at, right=True) / len(x)
    for a, b in zip(ours, theirs.T.contiguous()):                       # Kolmogorov-Smirnov distance, p = 0.005
        assert (below(a, b) - below(b, b)).abs().max() < 0.045
    assert (ours[0] + ours[2]).max() <= 32 and (ours[1] + ours[3]).max() <= 32
    images, u = torch.randint(0, 256, (100, 3, 32, 32), dtype=torch.uint8), torch.rand(100, 23)
    views, boxes = data.random_crop_flip(images, u, area), torch.stack(data.crop_boxes(u, 32, area), 1).int()
    for i, (top, left, height, width) in enumerate(boxes.tolist()):
        crop = images[i:i + 1, :, top:top + height, left:left + width] / 255
        wanted = F.interpolate(crop, size=(32, 32), mode="bilinear", align_corners=False)[0]
        assert torch.allclose(views[i], wanted.flip(2) if u[i, 22] < 0.5 else wanted, atol=1e-4)


def test_colour_changes_are_torchvisions():
    torch.manual_seed(0)
    x, strengths = torch.rand(6, 3, 8, 8), torch.tensor([-1, -0.5, 0, 0.3, 0.7, 1.0])
    changes = [TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue]
    for k, size in enumerate((0.4, 0.4, 0.4, 0.1)):
        ours = data.jitter_colours(x, strengths[:, None] * (torch.arange(4) == k), [k])
        wanted = [changes[k](x[i], (1 if k < 3 else 0) + size * strengths[i].item()) for i in range(6)]
        assert torch.allclose(ours, torch.stack(wanted), atol=2e-3)
    image = (x[:1] * 255).byte().expand(1000, 3, 8, 8)
    views = data.augment(image, torch.Generator().manual_seed(0), crop=(1.0, 1.0), **PLAIN)
    grey = views.std(1).amax((1, 2)) < 1e-5
    changed = torch.minimum(*((views - x / 255).abs().amax((1, 2, 3)) for x in (image, image.flip(3)))) > 1e-5
    assert 160 < grey.sum() < 240 and 800 < changed.sum() < 880     # greyscale 0.2, jitter 0.8: 0.84 either


def test_every_view_draws_its_own_parameters_and_blur_blurs():
    image = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8).expand(32, 3, 16, 16)
    draw = lambda **kw: data.augment(image, torch.Generator().manual_seed(0), **PLAIN | kw)
    views = draw()
    assert len({v.numpy().tobytes() for v in views}) == 32 and views.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(views, draw()) and torch.equal(draw(share=slice(2, 5)), views[2:5])
    assert torch.allclose(draw(mean=(0.5, 0, 0), std=(0.2, 1, 1))[:, 0], (views[:, 0] - 0.5) / 0.2, atol=1e-5)
    blurred, sharp = (draw(crop=(1.0, 1.0), jitter=0, grey=0, blur=blur) for blur in (0.5, 0.0))
    same = (blurred - sharp).abs().amax((1, 2, 3)) < 1e-5
    assert 6 <= same.sum() <= 26 and (blurred.std((1, 2, 3)) <= sharp.std((1, 2, 3)) + 1e-5).all()
    assert torch.allclose(blurred.mean(), sharp.mean(), atol=0.02)


def write_image(path, colour=(10, 200, 30), size=(8, 8), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path):
    for part, k, i in itertools.product(("train", "test"), range(12), range(3)):
        write_image(tmp_path / "own" / part / f"c{k}" / f"{i}.png", (20 * k, 10 * i, 99), (9 + i, 8))
    return tmp_path / "own"


def test_folder_is_sorted_cropped_measured_and_its_errors_are_named(folder):
    load = lambda: data.load("folder", folder, tasks=3, image_size=8)
    pixels = torch.randint(0, 256, (8, 12, 3), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(folder / "train" / "c10" / "0.png")
    d = load()
    assert d.names[:4] == ["c0", "c1", "c10", "c11"] and d.train_labels[6] == 2 and len(d.tasks) == 3
    assert torch.equal(d.train_images[6], pixels[:, 2:10].permute(2, 0, 1))             # the central square
    std, mean = torch.std_mean(d.train_images.double() / 255, (0, 2, 3), correction=0)
    assert d.recipe["mean"] == pytest.approx(mean.tolist()) and d.recipe["std"] == pytest.approx(std.tolist())
    (folder / "test").rename(folder / "val")
    assert torch.equal(load().test_images, d.test_images)
    (folder / "train" / "c3" / "1.png").write_bytes(b"not an image")
    with pytest.raises(data.UserError, match="c3.1.png is not a readable image"):
        load()
    shutil.rmtree(folder / "train" / "c3")
    with pytest.raises(data.UserError, match="'c3'.* only in one of"):
        load()


def test_tiny_imagenet_in_its_official_layout(tmp_path):
    base, wnids = tmp_path / "tiny-imagenet-200", ("n02", "n01")
    for (k, wnid), (i, mode) in itertools.product(enumerate(wnids), enumerate(("RGB", "L", "RGB", "RGB"))):
        write_image(base / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", (99 * k, 0, 0), (64, 64), mode)
        write_image(base / "val" / "images" / f"val_{i}.JPEG", size=(64, 64))
    lines = (f"val_{i}.JPEG\t{wnids[i % 2]}\t0\t0\t62\t62\n" for i in range(4))
    (base / "val" / "val_annotations.txt").write_text("".join(lines))
    (base / "wnids.txt").write_text("\n".join(wnids) + "\n")
    d = data.load("tinyimagenet", tmp_path, tasks=2)
    assert d.train_images.shape == (8, 3, 64, 64) and d.test_labels.tolist() == [0, 1, 0, 1]    # as in wnids.txt
    assert d.train_labels.tolist() == [0] * 4 + [1] * 4 and d.train_images[4].float().mean((1, 2))[0] > 90
    for file in ("train/n01/images/n01_3.JPEG", "val/val_annotations.txt"):
        (base / file).unlink()
        with pytest.raises(data.UserError, match="not complete.*http"):
            data.load("tinyimagenet", tmp_path, tasks=2)


def test_cifar_through_torchvision(tmp_path, monkeypatch):
    cifar = torchvision.datasets.CIFAR10
    images = torch.tensor([1, 2, 3], dtype=torch.uint8).expand(20, 32, 32, 3).numpy()   # channels last
    with monkeypatch.context() as patch:
        patch.setattr(cifar, "__init__", lambda self, root, train, download: vars(self).update(
            data=images, targets=[i % 10 for i in range(20)], classes=list("abcdefghij")))
        d = data.load("cifar10", tmp_path, image_size=16)
    assert d.train_images.shape == (20, 3, 16, 16) and (d.train_images[:, 2] == 3).all() and d.tasks[4] == [8, 9]
    monkeypatch.setattr(cifar, "download", lambda self: open("/no/network"))
    with pytest.raises(data.UserError, match="not complete.*http"):
        data.load("cifar10", tmp_path)


# ---------------------------------------------------------------------------- metrics and readouts

def test_metrics_by_hand():
    A = [[90.0, None, None], [70.0, 80.0, None], [75.0, 60.0, 95.0]]
    assert evaluation.average_accuracy(A) == pytest.approx((75 + 60 + 95) / 3)
    assert evaluation.forgetting(A) == pytest.approx(((90 - 75) + (80 - 60)) / 2)
    assert evaluation.forgetting([[50.0], [70.0, 80.0]]) == -20 and math.isnan(evaluation.forgetting([[40.0]]))
    scores = torch.tensor([[0.9, 0.1, 0, 0], [0.2, 0.3, 0.9, 0], [0.9, 0, 0.5, 0.1], [0, 0, 0.1, 0.9]])
    assert evaluation.accuracies(scores, torch.arange(4), [[0, 1], [2, 3]]) == ([50, 50], [100, 100])


def test_neural_collapse_equals_its_definitions_in_loops():
    z, p, y = unit(12, 4), simplex_etf(5, 4).double(), torch.arange(12) % 3      # three of five classes seen
    mu = [sum(z[i] for i in range(12) if y[i] == k) / 4 for k in range(3)]
    m, w = ([(v - sum(rows) / 3) / (v - sum(rows) / 3).norm() for v in rows] for rows in (mu, list(p[:3])))
    nearest = [(max(range(3), key=lambda k: x @ p[k]), min(range(3), key=lambda k: (x - mu[k]).norm())) for x in z]
    wanted = [sum((z[i] - mu[y[i]]).norm().item() ** 2 for i in range(12)) / 12,
              sum(abs(float(m[i] @ m[j]) + 1 / 2) for i, j in ((0, 1), (0, 2), (1, 2))) / 3,
              sum((a - b).norm().item() for a, b in zip(m, w)) / 3, 100 * sum(a == b for a, b in nearest) / 12]
    assert list(evaluation.neural_collapse(z, y, p).values()) == pytest.approx(wanted)
    assert list(evaluation.neural_collapse(p[y], y, p).values()) == pytest.approx([0, 0, 0, 100], abs=1e-3)
    assert evaluation.neural_collapse(p[:1], y[:1], p)["nc2"] is None


def test_probe_reaches_the_optimum_of_its_class_balanced_loss():
    """Against Newton's method on the same features; class 1 is absent."""
    torch.manual_seed(0)
    y = torch.tensor([0] * 300 + [2] * 60)
    x = torch.randn(360, 2) * torch.tensor([1.0, 4.0]) + torch.stack([y * 0.75, -y], 1)
    weight, bias = evaluation.linear_probe(x, y, 3, draws=4000, epochs=60, lr=0.1, seed=0)
    design, t = torch.cat([x, torch.ones(360, 1)], 1).double(), y.double() / 2
    balance, w = torch.where(y == 0, 1 / 300, 1 / 60).double(), torch.zeros(3, dtype=torch.float64)
    for _ in range(30):
        p = (design @ w).sigmoid()
        hessian = design.T @ (design * (balance * p * (1 - p))[:, None])
        w -= torch.linalg.solve(hessian, design.T @ (balance * (p - t)))
    ours = torch.cat([weight[2] - weight[0], (bias[2] - bias[0])[None]]).double()
    assert torch.allclose(ours, w, rtol=0.1, atol=0.05), (ours, w)


def gaussian_task(classes, n=400, seed=0):
    """Features (n * classes, 5) and labels: a Gaussian for each class, the same covariance."""
    y, g = torch.tensor(classes).repeat(n), torch.Generator().manual_seed(seed)
    noise = torch.randn(len(y), 5, generator=g, dtype=torch.float64) * torch.arange(1, 6)
    return 7 * unit(10, 5, 9)[y] + noise @ unit(5, 5), y


def test_discriminant_equals_the_formula():
    (h, y), eye = gaussian_task([0, 1, 2], n=30), torch.eye(5, dtype=torch.float64)
    means, S = evaluation.class_statistics(h, y)
    assert torch.allclose(means, torch.stack([sum(h[i] for i in range(90) if y[i] == k) / 30 for k in range(3)]))
    assert torch.allclose(S, sum(torch.outer(h[i] - means[y[i]], h[i] - means[y[i]]) for i in range(90)) / 90)
    weight, bias = evaluation.discriminant(means, S, shrink=0.1)
    inverse = torch.linalg.inv(S + 0.1 * sum(S[a, a] for a in range(5)) / 5 * eye)
    for k in range(3):
        wanted = h[7] @ inverse @ means[k] - means[k] @ inverse @ means[k] / 2
        assert (h[7] @ weight[k] + bias[k]).item() == pytest.approx(wanted.item())


def image_free(tasks, encoders):
    """The readout over tasks of (features, labels), seen through one encoder each: classifier and statistics."""
    statistics = None
    for t, (h, y) in enumerate(tasks):
        new = evaluation.class_statistics(encoders[t](h), y)
        moved = evaluation.fit_map(encoders[t - 1](h), encoders[t](h), ridge=1e-9)
        statistics = evaluation.carry(*statistics, *moved, *new) if t else new
    return evaluation.discriminant(*statistics, shrink=1e-9), statistics


def test_image_free_readout_is_lda_for_a_still_encoder_and_follows_an_affine_drift():
    tasks = [gaussian_task([2 * t, 2 * t + 1], seed=t) for t in range(3)]
    (weight, bias), statistics = image_free(tasks, [lambda h: h] * 3)
    at_once = evaluation.class_statistics(*(torch.cat(parts) for parts in zip(*tasks)))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(statistics, at_once))
    moving = [lambda h, W=unit(5, 5, seed), seed=seed: h @ W + seed for seed in (1, 2, 3)]
    (moved_weight, moved_bias), _ = image_free(tasks, moving)
    test, y = gaussian_task(list(range(6)), seed=50)
    still, moved = test @ weight.T + bias, moving[2](test) @ moved_weight.T + moved_bias
    assert (still.argmax(1) == moved.argmax(1)).float().mean() > 0.999 and (still.argmax(1) == y).float().mean() > 0.5


def test_image_free_covariance_includes_what_the_map_leaves_unexplained():
    (old, y), none = gaussian_task([0, 1], n=2000), (torch.zeros(0, 5).double(), torch.zeros(5, 5).double())
    new = old + 2 * torch.randn(old.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    carried = evaluation.carry(*evaluation.class_statistics(old, y), *evaluation.fit_map(old, new), *none)
    assert all(torch.allclose(a, b, atol=0.5) for a, b in zip(carried, evaluation.class_statistics(new, y)))


@pytest.mark.parametrize("h, y", [
    pytest.param(F.pad((Y % 2)[:, None], (0, 4)).float(), Y % 2, id="dead features, no variance within classes"),
    pytest.param(torch.zeros(16, 5), Y % 2, id="all zero"),
    pytest.param(unit(16, 50).float(), Y % 2, id="fewer images than features"),
    pytest.param(unit(16, 5).float(), Y * 0, id="one class")])
def test_image_free_readout_is_finite_for_singular_features(h, y):
    for h in (h, h.double()):
        statistics = evaluation.class_statistics(h, y)
        carried = evaluation.carry(*statistics, *evaluation.fit_map(h, h), *statistics)
        assert all(part.isfinite().all() for part in (*carried, *evaluation.discriminant(*carried)))


def test_more_images_begin_with_the_images_and_depend_on_the_generator_alone():
    images = torch.randint(0, 256, (9, 3, 8, 8), dtype=torch.uint8)
    more, again, other = (evaluation.more_images(images, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert more.dtype == torch.uint8 and more.shape[1:] == (3, 8, 8) and torch.equal(more[:9], images)
    assert torch.equal(more, again) and not torch.equal(more, other)
    assert len({image.numpy().tobytes() for image in more}) > 18


# ---------------------------------------------------------------------------- training and evaluation

@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "OLD_CROPS", 3)             # quicker
    return tmp_path


def ok(program, *argv, status=0):
    """What train.main or eval.main prints, run as the command is and ending with this status."""
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, argv)])
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            train.command(program.main)
    assert (stop.value.code or 0) == status, text.getvalue()
    return text.getvalue()


refused = functools.partial(ok, status=2)
run = lambda out, *argv: ok(train, "--out", out, *TINY, *argv)
log = lambda run: [json.loads(line) for line in open(f"{run}/log.jsonl")]
state = lambda run, t: data.read(Path(run) / f"task{t}.pt")
same_run = lambda a, b, tasks=(1, 2, 5): all(same(state(a, t), state(b, t)) for t in tasks)
results = lambda run, *argv: ok(evaluation, run, *argv) and json.load(open(f"{run}/results.json"))


def same(a, b):
    """Bitwise equality of nested checkpoints, times in the log aside."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a.keys() - {"seconds", "views_per_second"})
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


def test_three_readouts_of_which_only_the_linear_one_needs_old_images(here, monkeypatch):
    """Ten classes of one colour each; after task 1 the encoder changes only by the scale and offset of its features."""
    colours = torch.tensor([*itertools.product((30, 220), repeat=3), (120, 30, 120), (30, 120, 120)]).view(10, 3, 1, 1)
    y = [torch.arange(10).repeat_interleave(n) for n in (20, 10)]
    x = [(colours[k] + torch.randint(-20, 20, (len(k), 3, 8, 8))).byte() for k in y]
    monkeypatch.setitem(data.LOADERS, "shapes", lambda root: (x[0], y[0], x[1], y[1], list("abcdefghij")))
    run("one", "--epochs", 1, "--limit-per-class", 20, "--val-fraction", 0.1)
    for t in range(1, 6):                                       # scale and offset are t, kept in a bias
        net = state("one", 1)["net"] | {"projector.3.bias": torch.full((16,), float(t))}
        data.save(Path(f"one/task{t}.pt"), state("one", t) | {"net": net})
    for name, real in (("features", Encoder.features), ("joined", Encoder.joined)):
        monkeypatch.setattr(Encoder, name, lambda self, x, real=real: (real(self, x) + 1) * self.projector[3].bias[0])
    both = [results("one", "--epochs", 10, "--lr", 0.2, "--probe-samples", n) for n in (0, 60)]
    linear, image_free = ([r[name]["class_il"]["aa"] for r in both] for name in ("linear", "image_free"))
    assert linear[0] < 30 and linear[1] > 80 and image_free[0] == image_free[1] > 80
    assert [r["old_classes_covered"] for r in both] == [0, 8] and [r["old_images"] for r in both] == [0, 60]
    for name, kind in itertools.product(("linear", "image_free", "prototype"), ("class_il", "task_il")):
        r, task_il = both[1][name][kind], both[1][name]["task_il"]["matrix"]
        assert [[a is None for a in row] for row in r["matrix"]] == [[i > t for i in range(5)] for t in range(5)]
        assert r["aa"] == pytest.approx(sum(r["matrix"][4]) / 5)
        assert r["forgetting"] == pytest.approx(evaluation.forgetting(r["matrix"]))
        assert all(a is None or a <= b for row, row_b in zip(r["matrix"], task_il) for a, b in zip(row, row_b))
    ok(evaluation, "one", "--epochs", 1, "--split", "val")
    assert json.load(open("one/results-val.json"))["split"] == "val"


@pytest.mark.parametrize("buffer", [0, 6])
def test_evaluation_after_a_task_sees_its_images_and_the_kept_ones_alone(here, monkeypatch, buffer):
    """A spy on all images that an encoder gets after each task: crops for linear, plain images for image-free."""
    run("one", "--buffer", buffer, "--epochs", 1, "--epochs-first", 1)
    d = data.load("shapes", image_size=8, limit_per_class=6)
    owner = {image.numpy().tobytes(): (part, label) for part in ("train", "test") for image, label in
             zip(getattr(d, f"{part}_images"), getattr(d, f"{part}_labels").tolist())}
    encode, load_net, seen = evaluation.encode, evaluation.load_net, []

    def spy(layer, images, view):
        parts, labels = zip(*(owner[image.numpy().tobytes()] for image in images))
        seen[-1].append((*set(parts), not torch.equal(view(images), view(images)), sorted(labels)))
        return encode(layer, images, view)
    monkeypatch.setattr(evaluation, "encode", spy)
    monkeypatch.setattr(evaluation, "load_net", lambda *args: seen.append([]) or load_net(*args))
    monkeypatch.setattr(evaluation, "more_images", lambda images, generator: images)
    results("one", "--epochs", 1, *([] if buffer else ["--probe-samples", 6]))
    for t, calls in enumerate(seen):
        task, shown = [2 * t] * 6 + [2 * t + 1] * 6, sorted([*range(2 * t + 2)] * 10)
        known = [("train", True, task), ("train", False, task), ("test", False, shown)]
        old = [call for call in calls if call not in known]     # crops, no more images than are kept
        assert all(call in calls for call in known) and len(old) == (evaluation.OLD_CROPS if t else 0)
        assert all(crops and len(labels) == 6 and max(labels) < 2 * t for _, crops, labels in old)


def test_runs_that_differ_in_seed_alone_are_averaged_joint_training_and_tasks_of_one_class(here):
    for name, flags in (("s0", "--tasks 2"), ("s1", "--tasks 2 --seed 1 --init s0/task1.pt"), ("joint", "--tasks 1"),
                        ("half", "--tasks 2 --seed 2"), ("co2l", "--plasticity supcon --stability ird --tasks 10")):
        run(name, "--epochs-first", 1, "--epochs", 1, *flags.split())
    Path("half/task2.pt").unlink()                              # not finished: not in the average
    printed = ok(evaluation, "s0", "s1", "half", "joint", "co2l", "--epochs", 2, "--probe-samples", 4)
    r = {name: json.load(open(f"{name}/results.json")) for name in ("s0", "s1", "joint", "co2l")}
    aa = [r[name]["linear"]["class_il"]["aa"] for name in ("s0", "s1")]
    averages = [line for line in printed.splitlines() if "±" in line and "linear" in line]
    assert len(averages) == 1 and f"{sum(aa) / 2:.1f} ± {abs(aa[0] - aa[1]) / 2 ** 0.5:.1f}" in averages[0]
    joint = r["joint"]["linear"]["task_il"]                     # scored over the dataset's own tasks
    assert len(joint["matrix"][0]) == 5 and joint["forgetting"] is None
    assert all(r["co2l"][name]["task_il"]["aa"] == 100 for name in ("linear", "image_free"))
    assert [key for key, value in r["co2l"]["nc"].items() if value is None] == ["nc3", "nc4"]   # no prototypes


def test_without_a_name_the_run_that_was_written_to_last_is_evaluated(here, monkeypatch):
    for name, started, written in (("a", 1, 40), ("b", 2, 30), ("c", 3, 20)):
        Path("runs", name).mkdir(parents=True)
        for file, when in (("config.json", started), ("log.jsonl", written)):
            Path("runs", name, file).write_text('{"settings": {}}')
            os.utime(Path("runs", name, file), (when, when))
    monkeypatch.setattr(evaluation, "evaluate", lambda run, **options: data.refuse(True, f"chosen: {run}"))
    assert "chosen: runs/a" in refused(evaluation)


# Every flag of train.py with a value that changes what is learned in two tasks, and those that do not.
CHANGE = """--plasticity supcon, --stability ird, --stability sprd, --stability none, --no-pseudo-replay, --tau 0.3,
    --plasticity-weight 3, --stability-weight 2, --gamma 4, --e0 0, --kappa-past 0.2, --kappa-current 0.1,
    --zeta-past 0.3, --zeta-current 0.4, --epochs-first 1, --epochs 3, --batch-size 4, --lr 0.02, --dim 20, --width 9,
    --image-size 12, --prototypes 14, --limit-per-class 4, --val-fraction 0.2, --seed 1, --buffer 5, --tasks 5, --amp"""
KEEP = "--dataset shapes, --data-dir elsewhere, --device auto, --pseudo-replay, --no-amp, --no-compile, --no-resume"


def test_every_flag_does_something(here):
    tested, net = {"--out", "--resume", "--init", "--compile", "--help", "-h"}, {}
    for flag in ["", *CHANGE.split(","), *KEEP.split(",")]:
        run(f"runs/{flag}", "--tasks", 2, "--limit-per-class", 3, *flag.split())
        net[flag] = [state(f"runs/{flag}", t)["net"] for t in (1, 2)]
        assert same(net[flag][1], net[""][1]) == (flag not in CHANGE.split(",")), flag
        tested |= set(flag.split()[:1])
    assert same(net[" --buffer 5"][0], net[""][0])              # task 1 is the same with any buffer
    assert tested == {name for action in train.build_parser()._actions for name in action.option_strings}


def test_presets_fill_only_what_is_unset():
    for flags, wanted in {
            "cifar10": dict(epochs_first=500, epochs=100, batch_size=512, lr=0.5, dim=128, width=64, gamma=1, tau=0.5,
                            e0=30, kappa_past=0.01, kappa_current=0.2, zeta_past=0.01, zeta_current=0.2,
                            plasticity_weight=0.5 / 0.07, stability_weight=1, out="runs/cifar10-buffer0-seed0"),
            "cifar100": dict(tasks=5, gamma=4, zeta_past=0.1), "shapes": dict(stability_weight=4),
            "tinyimagenet": dict(tasks=10, epochs=50, lr=0.1, dim=256, gamma=4, e0=20, kappa_past=0.1, zeta_past=0.1),
            "cifar10 --gamma 0 --epochs 20 --plasticity-weight 0": dict(gamma=0, plasticity_weight=0, e0=6)}.items():
        assert wanted.items() <= vars(train.parse(["--dataset", *flags.split()])).items()


def test_a_step_follows_the_weighted_sum_of_both_losses():
    """Eq. 6 with its weights, written out: the gradient that train_step leaves in the network."""
    c = train.parse("--plasticity-weight 3 --stability-weight 40".split())
    net, again, teacher = (train.load_net(None, train.parse(["--seed", seed]), CPU)[0].train() for seed in "001")
    x, y, p = torch.randn(12, 3, 16, 16), torch.tensor([2, 3, 0] * 4), simplex_etf(10, c.dim)
    teacher, optimizer = frozen_copy(teacher), torch.optim.SGD(net.parameters(), lr=0.1)
    parts = train.train_step(net, teacher, optimizer, x, y, prototypes=p, old=2, seen=4, alpha=0.5, c=c)
    z = again(x)
    plasticity = fnc2_loss(z, y, p, p[:2], y >= 2, tau=c.tau, gamma=c.gamma)
    stability = hsd_loss(z, teacher(x), p[:4], 0.5, kappa_current=c.kappa_current, kappa_past=c.kappa_past,
                         zeta_current=c.zeta_current, zeta_past=c.zeta_past)
    (3 * plasticity + 40 * stability).backward()
    assert parts.tolist() == pytest.approx([plasticity.item(), stability.item(), z.mean(0).norm().item()], rel=1e-4)
    largest = max(parameter.grad.abs().max() for parameter in again.parameters())
    for a, b in zip(net.parameters(), again.parameters()):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5 * largest)
        assert torch.allclose(a, b - 0.1 * a.grad, atol=1e-6)   # one step of SGD


def test_what_the_loop_hands_to_the_losses(here, monkeypatch):
    """Current views as anchors, P_1:t-1 to FNC2, P_1:t and alpha of Eq. 10 to HSD, task t-1's network as teacher."""
    calls = {name: [] for name in ("fnc2_loss", "hsd_loss", "frozen_copy", "SGD")}
    for name, record in calls.items():
        module = torch.optim if name == "SGD" else train
        monkeypatch.setattr(module, name, lambda *args, _real=getattr(module, name), _record=record, **kw:
                            _record.append((args, kw)) or _real(*args, **kw))
    run("a", "--buffer", 9, "--epochs-first", 1, "--e0", 1, "--batch-size", 12)
    distilled = dict.fromkeys((len(args[2]), args[3]) for args, _ in calls["hsd_loss"])
    assert list(distilled) == [(2 * task, alpha) for task in (2, 3, 4, 5) for alpha in (0.0, 0.5)]
    teachers = [args[0].state_dict() for args, _ in calls["frozen_copy"]]
    assert len(teachers) == 4 and all(same(net, state("a", t)["net"]) for t, net in enumerate(teachers, 1))
    assert [kw for _, kw in calls["SGD"]] == [dict(lr=0.01, momentum=0.9, weight_decay=1e-4)]   # one for all tasks
    for (_, y, prototypes, old, anchors), _ in calls["fnc2_loss"]:
        task = y.max().item() // 2
        assert torch.equal(old, prototypes[:2 * task]) and torch.equal(anchors, y >= 2 * task)
        assert torch.equal(*y.chunk(2))                         # two views of each image
    assert any((args[1] < 2).any() for args, _ in calls["fnc2_loss"][-4:])                      # the buffer is replayed
    buffer = state("a", 3)["buffer"]                            # each of 24 old images was offered once
    assert buffer["seen"] == 24 and len(buffer["labels"]) == 9 and buffer["labels"].max() < 4
    assert [(e["task"], e["epoch"], e["alpha"], e["lr"]) for e in log("a")[1:]] == [
        (t, e, e / 2 - 0.5, train.learning_rate((e - 1) / 2, 2, 0.01)) for t in (2, 3, 4, 5) for e in (1, 2)]


def test_learning_rate_and_time_left(capsys):
    rates = [train.learning_rate(e / 100, 100, 0.5) for e in range(101)]
    assert rates[0] == 0.01 and max(rates) == rates[10] and rates[100] == pytest.approx(0.0005)
    assert rates[50] == pytest.approx(0.25025) and rates[5] == pytest.approx((0.01 + rates[10]) / 2)
    assert train.learning_rate(0.05, 10, 0.5) < train.learning_rate(0.1, 10, 0.5)       # a tenth of a short task
    entry = dict(epoch=1, plasticity=1, stability=0, mean_embedding=0, alpha=0, lr=0, seconds=60, views_per_second=9)
    for task, stability, minutes in ((1, "hsd", 1 + 4 * 3 * 4 / 3), (1, "none", 1 + 4 * 3), (2, "hsd", 1 + 3 * 3)):
        c = train.parse(f"--tasks 5 --epochs 3 --stability {stability}".split())
        train.report(entry | {"task": task}, 2, c)              # the teacher of later tasks adds a third
        assert f" {minutes:.1f} min left" in capsys.readouterr().out


def test_divergence_stops_the_run_and_a_collapse_is_reported(here, monkeypatch):
    assert "collapsed" not in run("fine", "--tasks", 1)
    forward = train.Encoder.forward
    with monkeypatch.context() as patch:
        patch.setattr(train.Encoder, "forward", lambda self, x: F.normalize(forward(self, x) * 1e-3 + 1, dim=1))
        assert "collapsed" in run("point", "--tasks", 1)
    monkeypatch.setattr(train, "fnc2_loss", lambda z, *args, **kw: z.sum() * math.nan)
    assert "not finite in task 1, epoch 1: fnc2 nan" in refused(train, "--out", "nan", *TINY)
    assert not list(Path("nan").glob("*.pt"))


# ---------------------------------------------------------------------------- resume, files, several processes

@pytest.fixture(scope="session")
def complete(tmp_path_factory):
    """A run without interruption."""
    path = tmp_path_factory.mktemp("complete") / "run"
    run(path, "--buffer", 5)
    return path


def stop_at(count, real, stop):
    """A function that calls stop() instead of the n-th call of the real one."""
    calls = itertools.count(1)
    return lambda *args, **kw: stop() if next(calls) == count else real(*args, **kw)


# Where, at which call, and what last.pt then holds: finished tasks, epochs of the next. Files are written in the
# order config.json; log.jsonl and last.pt in epoch 1, log.jsonl in epoch 2, task1.pt, last.pt; the same for task 2.
@pytest.mark.parametrize("module, name, count, finished, epoch", [
    (train, "fnc2_loss", 1, None, None),                        # inside the first step
    (train, "fnc2_loss", 5, 1, 1),                              # inside a step of task 2, which has two an epoch
    (train, "frozen_copy", 2, 2, 0),                            # between tasks 2 and 3
    (os, "fsync", 5, 0, 1),                                     # while task1.pt is written
    (os, "fsync", 8, 1, 0),                                     # while last.pt is written
    (os, "replace", 3, None, None),                             # before the first last.pt gets its name
    (os, "replace", 11, 1, 1)])                                 # after task2.pt, before its last.pt
def test_a_stopped_run_resumes_and_ends_where_a_complete_one_ends(here, monkeypatch, complete, module, name, count,
                                                                 finished, epoch):
    with monkeypatch.context() as patch:
        patch.setattr(train, "SAVE_SECONDS", 0)
        patch.setattr(module, name, stop_at(count, getattr(module, name), lambda: signal.default_int_handler(2, None)))
        assert "stopped (KeyboardInterrupt)" in ok(train, "--out", "cut", *TINY, "--buffer", 5, status=130)
    last = data.read("cut/last.pt") if Path("cut/last.pt").exists() else {}
    assert (last.get("finished"), last.get("epoch")) == (finished, epoch)
    assert Path("cut/task2.pt").exists() == ((name, count) in [("frozen_copy", 2), ("replace", 11)])
    assert ok(train, "--resume", "--out", "cut") and same_run(complete, "cut")
    assert same(log("cut"), log(complete)) and not list(Path("cut").glob("*.tmp"))


def python(code, *argv):
    """Start a run in another process, with the small dataset of these tests, after `code`."""
    command = [sys.executable, "-c", f"import os, test_fnc2, train\n{code}\ntrain.command(train.main)", *map(str, argv)]
    return subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_run_resumes_and_ends_where_a_complete_one_ends(here, complete):
    kill = "train.SAVE_SECONDS = 0; os.fsync = test_fnc2.stop_at(8, os.fsync, lambda: os.kill(os.getpid(), 9))"
    process = python(kill, "--out", "cut", *TINY, "--buffer", 5)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and Path("cut/last.pt.tmp").exists()
    assert ok(train, "--resume", "--out", "cut") and same_run(complete, "cut")


def test_a_broken_pipe_is_not_a_full_disk(here):
    process = python("", "--out", "a", *TINY, "--epochs-first", 200)
    process.stdout.readline()                                   # python train.py | head -1
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait() == 130 and "stopped (BrokenPipeError)" in error and len(error.splitlines()) == 1, error


def test_a_full_disk_stops_the_run_with_a_sentence_and_keeps_the_last_checkpoint(here):
    flags = [*TINY, "--buffer", 60, "--tasks", 2]
    run("complete", *flags)
    size = sum(os.path.getsize(f"complete/task{t}.pt") for t in (1, 2)) // 2    # task 2 has a buffer, task 1 has not
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        printed = refused(train, "--out", "short", *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search("task2.pt cannot be written .*existing checkpoints are intact", printed)
    assert not list(Path("short").glob("*.tmp"))
    assert ok(train, "--resume", "--out", "short") and same_run("complete", "short", tasks=(1, 2))


def test_init_ends_where_training_from_scratch_ends(here):
    flags = ["--tasks", 2, "--stability", "ird", "--buffer", 5]
    run("a", "--tasks", 2), run("scratch", *flags), run("seed1", "--seed", 1, "--init", "a/task1.pt", *flags)
    assert "task 1/2" not in run("b", "--init", "a/task1.pt", *flags)
    assert same_run("scratch", "b", tasks=[2]) and len(log("b")) == 4
    assert not torch.equal(*(data.read(f"{name}/task2.pt")["buffer"]["images"] for name in ("b", "seed1")))


def test_resume_keeps_the_settings_and_may_change_only_what_is_free(here, monkeypatch, complete):
    one = "runs/shapes-buffer0-seed0"                           # the default, and not where it was made
    shutil.copytree(complete, one)
    resume = ["--resume", "--out", one]
    for flag in ("--width 16", "--buffer 0", "--gamma 3", "--seed 1", "--epochs 5", "--amp", "--no-pseudo-replay"):
        assert "the run has " in refused(train, *resume, *flag.split()), flag
    c = train.parse([*resume, *"--compile --data-dir there --buffer 5".split()])
    assert (c.compile, c.data_dir, c.dim, c.buffer, c.limit_per_class) == (True, "there", 16, 5, 6)
    assert train.parse(["--resume"]).out == one
    config = json.load(open(f"{one}/config.json"))
    del config["settings"]["stability_weight"], config["settings"]["compile"]           # these take their default
    config["settings"]["of_a_later_version"] = 3
    Path(one, "config.json").write_text(json.dumps(config))
    c = train.open_run(one)[0]
    assert (c.stability_weight, c.compile, c.dim) == (4, False, 16)
    assert ok(train, *resume) and same_run(complete, one)       # a finished run stays as it is
    monkeypatch.setattr(train, "WORLD", 2)                      # on the CPU this would change the BatchNorm
    assert "resume with 1 process" in refused(train, *resume)
    assert "--batch-size 9 " in refused(train, "--out", "two", *TINY, "--batch-size", 9)


def test_a_switch_can_be_turned_off_on_resume(here, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda module: compiled.append(module) or module)
    run("c", "--compile", "--tasks", 2), run("plain", "--tasks", 2), run("amp", "--amp", "--tasks", 1)
    shutil.copy("c/task1.pt", "c/last.pt")
    ok(train, "--resume", "--out", "c", "--no-compile")
    assert len(compiled) == 2 and same_run("c", "plain", tasks=(1, 2))          # student and teacher, before the resume
    assert "the run has True" in refused(train, "--resume", "--out", "amp", "--no-amp")         # another result


def test_foreign_and_malicious_files_are_refused_and_run_nothing(here, complete):
    class Evil:
        __reduce__ = lambda self: (os.mkdir, ("evil-ran",))
    shutil.copytree(complete, "one")
    commands = [(evaluation, "one"), (train, "--init", "one/task1.pt", "--out", "two", *TINY)]
    contents = [pickle.dumps(Evil(), 2), b"", b"hello" * 100, (complete / "task1.pt").read_bytes()[:5000]]
    for value in ({"net": Evil()}, [1]):
        torch.save(value, "file.pt")
        contents.append(Path("file.pt").read_bytes())
    for content, command in itertools.product(contents, commands):
        Path("one/task1.pt").write_bytes(content)
        assert "task1.pt is not a checkpoint of this program" in refused(*command)
    torch.save({"net": {"weight": torch.zeros(3)}}, "one/task1.pt")
    assert "has no network of width 8" in refused(*commands[0])
    for settings in ("", "[]", '{"dataset": "x"}', '{"tau": "x"}'):
        Path("one/config.json").write_text('{"settings": %s}' % settings)
        for command in (commands[0], (train, "--resume", "--out", "one")):
            assert "config.json is damaged" in refused(*command), settings
    assert not Path("evil-ran").exists() and not Path("two").exists()


def test_mean_std_and_classes_of_a_folder_belong_to_the_run(here, folder):
    run("one", "--dataset", "folder", "--data-dir", folder, "--tasks", 3, "--epochs-first", 1, "--epochs", 1)
    for i in range(9):
        write_image(folder / "train" / "c0" / f"white{i}.png", (255, 255, 255))
    ok(evaluation, "one", "--epochs", 1)
    recipe = train.load_data(train.open_run("one")[0], CPU).recipe
    assert recipe == json.load(open("one/config.json"))["settings"]["recipe"]
    assert recipe["mean"] != pytest.approx(data.load("folder", folder, tasks=3, image_size=8).recipe["mean"], abs=0.05)
    for part in ("train", "test"):
        (folder / part / "c5").rename(folder / part / "other")
    for command in ((evaluation, "one"), (train, "--resume", "--out", "one")):
        assert "other classes than the run" in refused(*command)


TWO_PROCESSES = """
import torch.distributed as dist
from test_fnc2 import *

finish, dist.destroy_process_group = dist.destroy_process_group, lambda: None
train.main(sys.argv[1:])                                        # a run; then the gradient of one step, in float64

# BatchNorm without statistics, which would be each process's own
torch.nn.modules.batchnorm._BatchNorm.forward = lambda self, x: x * self.weight.mean() + self.bias.mean()
Encoder.forward = lambda self, x: F.normalize(self.projector(self.features(x)), dim=1)
c, x = train.parse(["--plasticity-weight", "3"]), torch.randn(12, 3, 16, 16)
y = torch.tensor([2, 3, 2, 3, 2, 3, 0, 1, 0, 2, 1, 0])          # six anchors in the first share, one in the second
dist.broadcast(x, 0)

def gradient():
    net, teacher = (train.load_net(None, train.parse(["--seed", k]), CPU)[0].double().train() for k in "01")
    student = torch.nn.parallel.DistributedDataParallel(net, broadcast_buffers=False) if train.WORLD > 1 else net
    optimizer, share = torch.optim.SGD(net.parameters(), lr=0.1), x.double().chunk(train.WORLD)[train.RANK]
    train.train_step(student, frozen_copy(teacher), optimizer, share, y, prototypes=simplex_etf(10, c.dim).double(),
                     old=2, seen=4, alpha=0.5, c=c)
    return [parameter.grad for parameter in net.parameters()]

of_two = gradient()
if train.RANK == 0:
    train.WORLD = 1
    torch.save((gradient(), of_two), "gradients.pt")
dist.barrier()
finish()
"""


def test_two_processes_have_the_gradient_of_one_and_make_one_run(here):
    Path("two.py").write_text(TWO_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "two.py",
               "--out", "two", *TINY, "--buffer", "7", "--epochs-first", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV | {"OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr
    one, two = torch.load("gradients.pt")
    largest = max(g.abs().max() for g in one)
    assert len(one) == len(two) > 60 and largest > 0.1
    assert max((a - b).abs().max() for a, b in zip(one, two)) < 1e-11 * largest
    assert done.stdout.count("task 5/5  epoch   2/2") == 1 and len(log("two")) == 9
    assert results("two", "--epochs", 1)["settings"]["processes"] == 2
    assert "resume with 2 processes" in refused(train, "--resume", "--out", "two")


# ---------------------------------------------------------------------------- wrong input, README

# Command | what the message says; without a bar it names the last flag and its value.
WRONG = """
train --buffer -1; train --buffer 1.5; train --tasks 0; train --tasks 3; train --tau 0; train --tau nan; train --lr inf
train --gamma -1; train --lr fast; train --epochs 0; train --batch-size 1; train --width 4; train --image-size 3
train --limit-per-class 0; train --val-fraction -1; train --val-fraction 1.0; train --val-fraction 0.001
train --seed -1; train --device gpu; train --device cuda:99; train --dataset mnist; train --colour red; train --ep 3
train --lr | expected one argument; train --dim 8 | --dim; train --prototypes 9 | --prototypes
train --dim 9 --prototypes 12 | 12 prototypes; train --e0 20 --epochs 20 | --e0 20 of --epochs 20
train --out done | done holds a run; train --out left | left holds a run; train --out a-file | a-file is a file
train --resume --out nowhere | nowhere is not a run; train --init nowhere.pt | nowhere.pt is not a checkpoint
train --init done/task1.pt | width 8 and dim 32; train --init done/task2.pt --dim 16 | not the task1.pt of a run
train --dataset folder --data-dir nowhere --tasks 2 | must hold train/<class>/
train --dataset folder --data-dir own | --tasks; train --dataset folder --data-dir own --tasks 5
train --dataset folder --data-dir one-class --tasks 1 | at least 2
eval nowhere | nowhere is not a run; eval empty | no finished task; eval done done | twice; eval | no run under runs/
eval done --epochs 0; eval done --lr nan; eval done --probe-samples -1; eval buffered --probe-samples 100
eval done --device tpu; eval done --split val | without --val-fraction; eval done --split train
"""


def test_wrong_input_gets_one_sentence_and_nothing_is_written_or_decoded(here, folder):
    run("done", "--tasks", 2), run("buffered", "--tasks", 2, "--buffer", 4)
    Path("empty").mkdir(), shutil.copy("done/config.json", "empty")
    Path("left").mkdir(), shutil.copy("done/last.pt", "left"), Path("a-file").write_text("")
    write_image(here / "one-class" / "train" / "a" / "1.png"), write_image(here / "one-class" / "test" / "a" / "1.png")
    tree = lambda: {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    before = tree()
    for case in re.split(r"[;\n]", WRONG.strip()):
        line, _, message = case.partition(" | ")
        program, *argv = line.split()
        printed = refused({"train": train, "eval": evaluation}[program], *argv)
        assert all(word in printed for word in ([message] if message else argv[-2:])), (case, printed)
        assert len(printed.strip().splitlines()) <= 2 and "decoding" not in printed, printed    # argparse adds usage
        assert tree() == before, case


README = (ROOT / "README.md").read_text()
COMMANDS = [[part.strip() for line in block.splitlines() for part in line.split("  #")[0].split("&&")]
            for block in re.findall(r"^```bash\n(.*?)^```", README.replace("\\\n", " "), re.S | re.M)]
snippet = lambda word: next(code for code in re.findall(r"```python\n(.*?)```", README, re.S) if word in code)


def test_readme_commands_are_valid_and_its_numbers_right(capsys):
    commands = [line.split()[1:] for line in sum(COMMANDS, []) if line.startswith("python ")]
    assert {"train.py", "eval.py", "-m"} <= {program for program, *_ in commands}
    for program, *argv in commands:
        if program == "train.py":
            train.settle(train.build_parser().parse_args(argv))
        elif program == "eval.py":
            evaluation.build_parser().parse_args(argv)
        else:
            assert program == "-m" or (ROOT / program).is_file()
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] in README
    exec(snippet("fnc2_loss"), {})
    wanted = re.findall(r"print\(.*?#\s*(.*)", snippet("fnc2_loss"))
    assert wanted and capsys.readouterr().out.splitlines() == [value.strip() for value in wanted]


def test_readme_quick_start_and_the_classification_of_ones_own_files(here, monkeypatch, capsys):
    """The first block of commands, with tiny settings added, then the block of Python about mine.png."""
    for program, *argv in (line.split()[1:] for line in COMMANDS[0] if line.startswith("python ")):
        monkeypatch.setattr(sys, "argv", [program, *argv, *(TINY if program == "train.py" else ["--epochs", "2"])])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        assert not stop.value.code, capsys.readouterr().err
    assert "Class-IL" in capsys.readouterr().out
    write_image(here / "mine.png", size=(40, 30))
    exec(snippet("mine.png"), {})
    assert re.search(r"'(\w+)'\]", capsys.readouterr().out)[1] in data.SHAPES
