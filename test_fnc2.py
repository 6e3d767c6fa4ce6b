"""Tests of the mathematics, the protocol and the commands. Needs torch, torchvision, pytest (and matplotlib for one).

The oracles are plain Python loops written from the equations, in float64; the code is compared with them.
"""

import contextlib
import functools
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import data
import eval as evaluation
import losses
import train
from buffer import ReservoirBuffer
from etf import simplex_etf
from losses import fnc2_loss, hsd_alpha, hsd_loss, ird_loss, sprd_loss, supcon_loss
from model import Encoder, frozen_copy

ROOT = Path(__file__).parent
TINY = "--limit-per-class 6 --width 8 --image-size 8 --batch-size 8 --epochs-first 2 --epochs 2 --dim 16 --device cpu".split()
data.LOADERS["shapes"] = functools.lru_cache(data.load_shapes)      # drawn once for all tests of this process


def unit(n, d, seed=0, dtype=torch.float64):
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=1)


# ---------------------------------------------------------------------------- prototypes

@pytest.mark.parametrize("K, d", [(2, 1), (2, 8), (10, 128), (100, 128), (129, 128), (200, 256)])
def test_prototypes_are_a_simplex_etf_up_to_d_plus_1(K, d):
    p = simplex_etf(K, d).double()
    wanted = torch.full((K, K), -1 / (K - 1), dtype=torch.float64).fill_diagonal_(1)        # Eq. 2
    assert p.shape == (K, d) and (p @ p.T - wanted).abs().max() < 1e-6


def test_prototypes_depend_on_the_seed_alone():
    torch.manual_seed(1)
    a = simplex_etf(10, 16, seed=3)
    torch.manual_seed(2)
    assert torch.equal(a, simplex_etf(10, 16, seed=3)) and not torch.equal(a, simplex_etf(10, 16, seed=4))
    with pytest.raises(ValueError, match="10 prototypes need at least 9 dimensions, got 8"):
        simplex_etf(10, 8)
    with pytest.raises(ValueError, match="got 1"):
        simplex_etf(1, 8)


# ---------------------------------------------------------------------------- losses against loops

def dot(a, b):
    return sum(float(x) * float(y) for x, y in zip(a, b))


def loop_fnc2(z, labels, prototypes, old, anchors, tau, gamma):
    total = 0.0
    for i in range(len(z)):
        if not anchors[i]:
            continue
        D = sum(math.exp(dot(z[i], z[k]) / tau) for k in range(len(z)) if k != i)
        D += sum(math.exp(dot(z[i], p) / tau) for p in old)
        P = [j for j in range(len(z)) if j != i and labels[j] == labels[i]]
        inner = 0.0
        for j in P:
            c = math.exp(dot(z[i], z[j]) / tau) / D
            inner += (1 - c) ** gamma * math.log(c)
        r = math.exp(dot(z[i], prototypes[labels[i]]) / tau) / D
        inner += max(0.0, 1 - r) ** gamma * math.log(r)
        total -= inner / (len(P) + 1)
    return total / len(z)                                       # over all views: the others count 0


def loop_supcon(z, labels, anchors, tau):
    total = 0.0
    for i in range(len(z)):
        P = [j for j in range(len(z)) if j != i and labels[j] == labels[i]]
        if anchors[i] and P:
            D = sum(math.exp(dot(z[i], z[k]) / tau) for k in range(len(z)) if k != i)
            total -= sum(math.log(math.exp(dot(z[i], z[j]) / tau) / D) for j in P) / len(P)
    return total / len(z)


def loop_distil(z, z_past, keys, keys_past, t_current, t_past, skip_self):
    def softmax(row, temperature):
        e = [math.exp(s / temperature) for s in row]
        return [x / sum(e) for x in e]
    total = 0.0
    for i in range(len(z)):
        ks = [k for k in range(len(keys)) if not (skip_self and k == i)]
        now = softmax([dot(z[i], keys[k]) for k in ks], t_current)
        past = softmax([dot(z_past[i], keys_past[k]) for k in ks], t_past)
        total -= sum(a * math.log(b) for a, b in zip(past, now))
    return total / len(z)


LABELS = torch.tensor([2, 3, 2, 3, 3, 2, 0, 1, 2])


@pytest.mark.parametrize("gamma", [0, 0.5, 1, 2, 3.7, 4])
@pytest.mark.parametrize("old", [0, 2])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_fnc2_equals_the_equation(gamma, old, asymmetric, tau):
    z, p = unit(9, 6), simplex_etf(5, 6).double()
    anchors = LABELS >= 2 if asymmetric else None
    value = fnc2_loss(z, LABELS, p, p[:old] if old else None, anchors, tau=tau, gamma=gamma)
    wanted = loop_fnc2(z, LABELS.tolist(), p, p[:old], LABELS >= 2 if asymmetric else [True] * 9, tau, gamma)
    assert value.item() == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("gamma", [0, 0.3, 1, 4])
def test_fnc2_equals_the_equation_where_r_exceeds_1(gamma):
    p = simplex_etf(4, 8).double()
    z, y = p[[2, 3]], torch.tensor([2, 3])                      # opposite views, each at its prototype: r = 5e11
    wanted = loop_fnc2(z, y.tolist(), p, [], [True] * 2, 0.05, gamma)
    assert fnc2_loss(z, y, p, tau=0.05, gamma=gamma).item() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_supcon_equals_the_equation_where_some_views_have_no_positive(asymmetric):
    z = unit(9, 6)                                              # classes 0 and 1 have a single view
    value = supcon_loss(z, LABELS, LABELS >= 1 if asymmetric else None, tau=0.5)
    wanted = loop_supcon(z, LABELS.tolist(), LABELS >= 1 if asymmetric else [True] * 9, 0.5)
    assert value.item() == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("past", [0.05, 0.5])
def test_distillation_equals_the_equations(past):
    z, z_past, p = unit(8, 6, 1), unit(8, 6, 2), simplex_etf(4, 6).double()
    ird = ird_loss(z, z_past, kappa_current=0.2, kappa_past=past)
    assert ird.item() == pytest.approx(loop_distil(z, z_past, z, z_past, 0.2, past, True), rel=1e-10)
    sprd = sprd_loss(z, z_past, p, zeta_current=0.3, zeta_past=past)
    assert sprd.item() == pytest.approx(loop_distil(z, z_past, p, p, 0.3, past, False), rel=1e-10)
    for alpha in (0.0, 0.3, 1.0):
        hsd = hsd_loss(z, z_past, p, alpha, kappa_current=0.2, kappa_past=past, zeta_current=0.3, zeta_past=past)
        assert hsd.item() == pytest.approx((1 - alpha) * ird.item() + alpha * sprd.item(), rel=1e-12)


def test_alpha_is_the_papers_schedule():
    assert [hsd_alpha(e, 100, 30) for e in (1, 30, 31, 65, 100)] == [0, 0, 0.01, 0.35, 0.7]
    assert [hsd_alpha(e, 100, 30, 0.5) for e in (30, 65, 80, 100)] == [0, 0.35, 0.5, 0.5]      # the authors' code


def test_known_values():
    z, y, p = torch.ones(6, 1), torch.tensor([0, 0, 0, 1, 1, 1]), simplex_etf(2, 1)
    assert supcon_loss(z, y, tau=0.5).item() == pytest.approx(math.log(5))      # equal similarities: chance, ln(2N-1)
    assert ird_loss(z, z, kappa_current=0.2, kappa_past=0.01).item() == pytest.approx(math.log(5))
    flat = torch.tensor([[0.0, 1.0]]).repeat(6, 1)                               # orthogonal to both prototypes
    p = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert sprd_loss(flat, flat, p, zeta_current=0.2, zeta_past=0.01).item() == pytest.approx(math.log(2))
    c, r = 1 / 5, math.exp(-2) / 5                                               # gamma 1, tau 0.5, no old prototypes
    wanted = -(2 * (1 - c) * math.log(c) + (1 - r) * math.log(r)) / 3
    assert fnc2_loss(flat, y, p, tau=0.5, gamma=1).item() == pytest.approx(wanted)


def all_losses(z, z_past, y, p, gamma=1.5, kappa=0.2, kappa_past=0.05, tau=0.5):
    return (fnc2_loss(z, y, p, p[:2], y >= 2, tau=tau, gamma=gamma), supcon_loss(z, y, y >= 2, tau=tau),
            hsd_loss(z, z_past, p, 0.4, kappa_current=kappa, kappa_past=kappa_past, zeta_current=kappa, zeta_past=kappa_past))


@pytest.mark.parametrize("gamma", [0, 0.5, 1, 4])
def test_gradients(gamma):
    p, z_past = simplex_etf(4, 5).double(), unit(7, 5, 1)
    y = torch.tensor([2, 2, 3, 3, 0, 1, 2])
    assert torch.autograd.gradcheck(lambda w: all_losses(F.normalize(w, dim=1), z_past, y, p, gamma),
                                    unit(7, 5).requires_grad_())


def test_losses_are_plain_autograd():
    """Second derivatives, torch.func and a graph without breaks, for whoever pastes the file."""
    z, z_past, p, y = unit(6, 5), unit(6, 5, 1), simplex_etf(4, 5).double(), torch.tensor([2, 2, 3, 3, 0, 2])
    total = lambda w: sum(all_losses(w, z_past, y, p))
    assert torch.autograd.gradgradcheck(total, z.clone().requires_grad_())
    w = z.clone().requires_grad_()
    total(w).backward()
    assert torch.allclose(torch.func.grad(total)(z), w.grad, rtol=1e-12)
    both, labels = torch.stack([z, z_past]), torch.stack([y, y.flip(0)])
    many = torch.func.vmap(lambda w, y: fnc2_loss(w, y, p, p[:2], tau=0.5, gamma=2))(both, labels)
    wanted = [loop_fnc2(a, b.tolist(), p, p[:2], [True] * 6, 0.5, 2) for a, b in zip(both, labels)]
    assert many.tolist() == pytest.approx(wanted, rel=1e-10)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
def test_losses_compile_to_one_graph():
    z, z_past, p, y = unit(6, 5), unit(6, 5, 1), simplex_etf(4, 5).double(), torch.tensor([2, 2, 3, 3, 0, 2])
    compiled = torch.compile(lambda w: sum(all_losses(w, z_past, y, p)), fullgraph=True)
    assert compiled(z).item() == pytest.approx(sum(all_losses(z, z_past, y, p)).item(), rel=1e-10)


@pytest.mark.parametrize("label", [-1, 4])
def test_a_label_without_a_prototype_is_named(label):
    with pytest.raises(ValueError, match=f"label {label} has no prototype: labels must be 0..3"):
        fnc2_loss(unit(3, 5), torch.tensor([0, label, 0]), simplex_etf(4, 5).double(), tau=0.5, gamma=1)


def test_hsd_computes_only_the_half_that_counts(monkeypatch):
    z, z_past, p = unit(6, 5), unit(6, 5, 1), simplex_etf(4, 5).double()
    for alpha, unused in ((0.0, "sprd_loss"), (1.0, "ird_loss")):
        with monkeypatch.context() as patch:
            patch.setattr(losses, unused, None)
            hsd_loss(z, z_past, p, alpha, kappa_current=0.2, kappa_past=0.05, zeta_current=0.2, zeta_past=0.05)


def test_focal_factor_is_nearly_idle_in_large_batches():
    """c_ij is about 1/(2N): at 128 views gamma 0 and 1 give the same direction (README, results)."""
    z, y, p = unit(128, 16), torch.arange(128) % 2, simplex_etf(10, 16).double()
    gradients = [torch.func.grad(lambda w: fnc2_loss(w, y, p, tau=0.5, gamma=gamma))(z) for gamma in (0, 1)]
    assert F.cosine_similarity(*(g.flatten() for g in gradients), dim=0) > 0.999


def test_the_teacher_normalises_by_the_batch_and_never_changes():
    z, z_past, p = (unit(6, 5, s).requires_grad_() for s in range(3))
    hsd_loss(z, z_past, p, 0.5, kappa_current=0.2, kappa_past=0.05, zeta_current=0.2, zeta_past=0.05).backward()
    assert z.grad is not None and z_past.grad is None
    net, x = Encoder(8, 8).train(), torch.randn(4, 3, 8, 8)
    teacher = frozen_copy(net)
    before = [t.clone() for t in teacher.state_dict().values()]
    assert torch.equal(teacher(x), net(x)) and not teacher(x).requires_grad         # the student's own normalisation
    assert [k for (k, v), old in zip(teacher.state_dict().items(), before) if not torch.equal(v, old) and "num_batches" not in k] == []


def test_losses_do_not_depend_on_batch_order_or_a_joint_rotation():
    z, z_past, p, y = unit(12, 6), unit(12, 6, 1), simplex_etf(4, 6).double(), torch.arange(12) % 4
    mixed, rotation = torch.randperm(12), torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    for a, b, c in zip(all_losses(z, z_past, y, p), all_losses(z[mixed], z_past[mixed], y[mixed], p),
                       all_losses(z @ rotation, z_past @ rotation, y, p @ rotation)):
        assert a.item() == pytest.approx(b.item(), rel=1e-10) == pytest.approx(c.item(), rel=1e-10)


@pytest.mark.parametrize("gamma", [0, 0.3, 1, 4])
@pytest.mark.parametrize("case", ["collapsed", "two clusters", "one class", "two views", "r above 1", "no anchor", "bfloat16"])
def test_losses_and_gradients_stay_finite_at_extremes(case, gamma):
    p = simplex_etf(4, 8)
    z, y, tau = unit(16, 8, dtype=torch.float32), torch.arange(16) % 4, 0.5
    if case == "collapsed":
        z = p[:1].repeat(16, 1)
    elif case == "two clusters":
        z, y, tau = p[torch.arange(16) % 2 + 2], torch.arange(16) % 2 + 2, 0.01
    elif case == "one class":
        y = torch.full((16,), 2)
    elif case == "two views":
        z, y = z[:2], torch.tensor([2, 2])
    elif case == "r above 1":                                   # opposite views, each class at its prototype
        z, y, tau = p[[2, 3]], torch.tensor([2, 3]), 0.05
    elif case == "no anchor":
        y = y % 2
    elif case == "bfloat16":
        z = z.bfloat16()
    z = z.clone().requires_grad_()
    z_past = unit(len(z), 8, 5, dtype=torch.float32) if case != "collapsed" else z.detach()
    losses = all_losses(z, z_past, y, p, gamma, kappa=0.01, kappa_past=0.01, tau=tau)
    assert all(math.isfinite(loss.item()) and loss.dtype == torch.float32 for loss in losses)
    sum(losses).backward()
    assert z.grad.isfinite().all()


def test_similarities_are_float32_under_autocast():
    z_past, p, results = unit(16, 8, 1, dtype=torch.float32), simplex_etf(4, 8), []
    for autocast in (False, True):
        z = unit(16, 8, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            values = all_losses(z, z_past, torch.arange(16) % 4, p, kappa=0.01, kappa_past=0.01)
        sum(values).backward()
        results.append((*values, z.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))     # the gradients too


# ---------------------------------------------------------------------------- network, buffer

def test_encoder_is_resnet18_at_width_64():
    import torchvision
    theirs = torchvision.models.resnet18()
    mine = Encoder(64, 128)
    backbone = sum(p.numel() for n, p in mine.named_parameters() if not n.startswith("projector"))
    assert backbone == sum(p.numel() for p in theirs.parameters()) - theirs.fc.weight.numel() - 1000 - 64 * 3 * (49 - 9)
    net, x = Encoder(4, 16).eval(), torch.randn(5, 3, 32, 32)
    assert net.features(x).shape == (5, 32) and net(x).shape == (5, 16)
    assert torch.allclose(net(x).norm(dim=1), torch.ones(5)) and (net(x) < 0).any()


def test_reservoir_keeps_every_image_of_the_stream_with_equal_probability():
    kept = torch.zeros(60)
    for seed in range(3000):
        buffer = ReservoirBuffer(6, seed)
        for part in torch.arange(60).split([25, 5, 30]):        # tasks of different size
            buffer.add(part.to(torch.uint8)[:, None], part)
        assert len(buffer) == 6 and torch.equal(buffer.images[:, 0].long(), buffer.labels)
        kept[buffer.labels] += 1
    # expected 300 each; variance n p (1-p); 60 cells: chi-square has mean 59 (times 0.9), std ~ 10
    assert ((kept - 300) ** 2 / 270).sum() < 100


def test_reservoir_of_no_or_little_capacity_and_its_state():
    empty, small, part = ReservoirBuffer(0), ReservoirBuffer(100), torch.arange(7)
    for buffer in (empty, small):
        buffer.add(part.to(torch.uint8), part)
    assert len(empty) == 0 and sorted(small.labels.tolist()) == list(range(7))
    a, b = ReservoirBuffer(4, 1), ReservoirBuffer(4, 2)
    a.add(part.to(torch.uint8), part)
    b.load_state_dict(a.state_dict())
    for buffer in (a, b):
        buffer.add(part.to(torch.uint8) + 7, part + 7)
    assert torch.equal(a.labels, b.labels) and torch.equal(a.images, b.images)


# ---------------------------------------------------------------------------- data

def test_task_split_is_numeric_with_200_classes():
    tasks = data.split_tasks(200, 10)
    assert tasks[0] == list(range(20)) and tasks[9] == list(range(180, 200))


def test_shapes_are_reproducible_distinct_and_split():
    one = data.load("shapes")
    assert one.train_images.shape == (5000, 3, 32, 32) and one.train_images.dtype == torch.uint8 and len(one.tasks) == 5
    labels = torch.arange(10)
    assert torch.equal(data.draw_shapes(labels, 0), data.draw_shapes(labels, 0))
    assert not torch.equal(data.draw_shapes(labels, 0), data.draw_shapes(labels, 1))
    pixels = one.train_images.float().transpose(0, 1).flatten(1) / 255
    assert torch.allclose(pixels.mean(1), torch.tensor(one.recipe["mean"]), atol=0.01)
    assert torch.allclose(pixels.std(1), torch.tensor(one.recipe["std"]), atol=0.01)
    held = data.load("shapes", val_fraction=0.1, limit_per_class=40, seed=1)
    assert held.val_images.shape[0] == 500 and held.train_images.shape[0] == 400
    as_set = lambda x: {bytes(i.numpy().tobytes()) for i in x}
    assert not as_set(held.val_images) & as_set(held.train_images)
    assert as_set(held.val_images) != as_set(data.load("shapes", val_fraction=0.1, seed=2).val_images)


def distance(a, b):
    """Kolmogorov-Smirnov distance of two samples."""
    grid = torch.cat([a, b]).sort().values
    return (torch.searchsorted(a.sort().values, grid, right=True) / len(a)
            - torch.searchsorted(b.sort().values, grid, right=True) / len(b)).abs().max().item()


def test_crops_and_flips_follow_torchvision():
    from torchvision.transforms import RandomResizedCrop
    torch.manual_seed(0)
    n, ours = 4000, data.crop_boxes(torch.rand(4000, 22), 32, (0.2, 1.0))
    theirs = torch.tensor([RandomResizedCrop.get_params(torch.zeros(3, 32, 32), (0.2, 1.0), (3 / 4, 4 / 3)) for _ in range(n)])
    for a, b in zip(ours, theirs.T.float()):                    # top, left, height, width
        assert distance(a, b) < 0.04                            # 1.8 standard errors of n = 4000 twice: p ~ 0.003
    assert (ours[0] + ours[2]).max() <= 32 and (ours[1] + ours[3]).max() <= 32
    images = torch.randint(0, 256, (200, 3, 32, 32), dtype=torch.uint8)
    u = torch.rand(200, 23)
    views = data.random_crop_flip(images, u, (0.2, 1.0))
    for i, (top, left, height, width) in enumerate(zip(*(v.int().tolist() for v in data.crop_boxes(u, 32, (0.2, 1.0))))):
        crop = images[i:i + 1, :, top:top + height, left:left + width].float() / 255
        wanted = F.interpolate(crop, size=(32, 32), mode="bilinear", align_corners=False)[0]
        assert torch.allclose(views[i], wanted.flip(2) if u[i, 22] < 0.5 else wanted, atol=1e-4)


def test_colour_changes_are_torchvisions_and_follow_its_distribution():
    from torchvision.transforms import ColorJitter, RandomGrayscale
    import torchvision.transforms.functional as TF
    torch.manual_seed(0)
    x = torch.rand(6, 3, 8, 8)
    theirs = [TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue]
    for k, size in enumerate((0.4, 0.4, 0.4, 0.1)):
        shift = torch.zeros(6, 4)
        shift[:, k] = torch.tensor([-1, -0.5, 0, 0.3, 0.7, 1.0])
        ours = data.jitter_colours(x, shift, [k])
        wanted = torch.stack([theirs[k](x[i], (1 if k < 3 else 0) + size * shift[i, k].item()) for i in range(6)])
        assert torch.allclose(ours, wanted, atol=2e-3)
    random.seed(0)
    image = (torch.rand(3, 8, 8) * 255).byte()
    jitter, grey = ColorJitter(0.4, 0.4, 0.4, 0.1), RandomGrayscale(0.2)
    reference = torch.stack([grey(jitter(image / 255)) if random.random() < 0.8 else grey(image / 255) for _ in range(3000)])
    plain = dict(mean=(0, 0, 0), std=(1, 1, 1), crop=(1.0, 1.0))
    # small calls: the order of the four changes is drawn per call
    views = torch.cat([data.augment(image.expand(2, 3, 8, 8), **plain) for _ in range(1500)])
    for statistic in (lambda v: v.mean((1, 2, 3)), lambda v: v.std((1, 2, 3)), lambda v: (v[:, 0] - v[:, 2]).abs().mean((1, 2))):
        assert distance(statistic(views), statistic(reference)) < 0.06


def test_every_view_draws_its_own_parameters_and_blur_blurs():
    image = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8).expand(32, 3, 16, 16)
    views = data.augment(image, torch.Generator().manual_seed(0), mean=(0, 0, 0), std=(1, 1, 1))
    assert len({v.numpy().tobytes() for v in views}) == 32 and views.is_contiguous(memory_format=torch.channels_last)
    again = data.augment(image, torch.Generator().manual_seed(0), mean=(0, 0, 0), std=(1, 1, 1))
    assert torch.equal(views, again)
    kw = dict(mean=(0, 0, 0), std=(1, 1, 1), crop=(1.0, 1.0), jitter=0, grey=0)
    blurred = data.augment(image, torch.Generator().manual_seed(0), blur=0.5, **kw)
    sharp = data.augment(image, torch.Generator().manual_seed(0), blur=0.0, **kw)
    same = (blurred - sharp).abs().amax((1, 2, 3)) < 1e-5
    assert 6 <= same.sum() <= 26 and (blurred.std((1, 2, 3)) <= sharp.std((1, 2, 3)) + 1e-5).all()
    assert torch.allclose(blurred.mean(), sharp.mean(), atol=0.02)


def test_augment_takes_bytes_and_floats_makes_a_share_and_says_what_it_needs():
    images, kw = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8), dict(mean=(0.5,) * 3, std=(0.2,) * 3)
    draw = lambda x, **more: data.augment(x, torch.Generator().manual_seed(3), **kw, **more)
    assert torch.allclose(draw(images), draw(images / 255), atol=1e-6)
    assert torch.equal(draw(images, share=slice(2, 5)), draw(images)[2:5])      # parameters are drawn for all
    for shape in ((2, 3, 8, 9), (2, 1, 8, 8), (3, 8, 8)):
        with pytest.raises(ValueError, match=re.escape(f"square RGB images (B, 3, S, S), got {shape}")):
            draw(torch.zeros(shape))


def write_image(path, colour=(10, 200, 30), size=(8, 8), mode="RGB"):
    from PIL import Image
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path):
    for part, k in itertools.product(("train", "test"), range(12)):
        for i in range(3):
            write_image(tmp_path / "own" / part / f"c{k}" / f"{i}.png", (20 * k, 10 * i, 99), (9 + i, 8))
    return tmp_path / "own"


def test_folder_is_resized_cached_and_decoded_again_when_it_changes(folder, monkeypatch):
    from PIL import Image
    first = data.load("folder", folder, tasks=3)
    assert first.train_images.shape == (36, 3, 32, 32) and len(first.tasks) == 3
    assert first.train_images[3].float().mean((1, 2)).tolist() == [20, 0, 99]       # c1 < c10 < c11 < c2: sorted names
    monkeypatch.setattr(Image, "open", None)                    # nothing is decoded a second time
    assert torch.equal(data.load("folder", folder, tasks=3).train_images, first.train_images)
    monkeypatch.undo()
    write_image(folder / "train" / "c0" / "0.png", (255, 255, 255))
    assert data.load("folder", folder, tasks=3).train_images[0].min() == 255
    cache = next(folder.glob(".fnc2-*"))
    cache.write_bytes(cache.read_bytes()[:1000])                # a damaged cache is made again
    assert data.load("folder", folder, tasks=3).train_images[0].min() == 255


def test_folder_problems_are_named(folder):
    (folder / "train" / "c3" / "1.png").write_bytes(b"not an image")
    with pytest.raises(data.Problem, match=r"c3.1.png cannot be read as an image"):
        data.load("folder", folder, tasks=3)
    for file in (folder / "train" / "c3").iterdir():
        file.unlink()
    with pytest.raises(data.Problem, match="class 'c3' has no training images"):
        data.load("folder", folder, tasks=3)
    (folder / "train" / "c3").rmdir()
    with pytest.raises(data.Problem, match="'c3' is in only one of"):
        data.load("folder", folder, tasks=3)
    with pytest.raises(data.Problem, match="must hold train/<class>/"):
        data.load("folder", folder / "nowhere", tasks=3)


def write_tiny(root, wnids=("n02", "n01"), images=4):
    base = root / "tiny-imagenet-200"
    for k, wnid in enumerate(wnids):
        names = [f"{wnid}_{i}.JPEG" for i in range(images)]
        for i, name in enumerate(names):                        # some official files are greyscale
            write_image(base / "train" / wnid / "images" / name, (100 * k, 0, 0), (64, 64), "L" if i == 1 else "RGB")
        (base / "train" / wnid / f"{wnid}_boxes.txt").write_text("".join(f"{n}\t0\t0\t62\t62\n" for n in names))
    lines = []
    for i in range(4):
        write_image(base / "val" / "images" / f"val_{i}.JPEG", (100 * (i % 2), 0, 0), (64, 64))
        lines.append(f"val_{i}.JPEG\t{wnids[i % 2]}\t0\t0\t62\t62\n")
    (base / "val" / "val_annotations.txt").write_text("".join(lines))
    (base / "wnids.txt").write_text("\n".join(wnids) + "\n")
    return base


def test_tiny_imagenet_in_its_official_layout(tmp_path):
    base = write_tiny(tmp_path)
    d = data.load("tinyimagenet", tmp_path, tasks=2)
    assert d.train_images.shape == (8, 3, 64, 64) and d.test_labels.tolist() == [0, 1, 0, 1]       # order of wnids.txt
    assert d.train_images[4].float().mean((1, 2))[0] > 90
    (base / "train" / "n01" / "images" / "n01_3.JPEG").unlink()
    with pytest.raises(data.Problem, match=r"n01_3.JPEG is missing.*http"):
        data.load("tinyimagenet", tmp_path, tasks=2)
    (base / "val" / "val_annotations.txt").unlink()
    write_image(base / "train" / "n01" / "images" / "n01_3.JPEG", size=(64, 64))
    with pytest.raises(data.Problem, match=r"val_annotations.txt is missing.*http"):
        data.load("tinyimagenet", tmp_path, tasks=2)


def test_cifar_in_its_official_format(tmp_path, monkeypatch):
    import hashlib, torchvision
    import numpy as np
    class Small(torchvision.datasets.CIFAR10):                  # the official files, with few images and their own md5
        train_list, test_list = [["data_batch_1", ""]], [["test_batch", ""]]
        meta = {"filename": "batches.meta", "key": "label_names", "md5": ""}
    base = tmp_path / Small.base_folder
    base.mkdir()
    for entry in (*Small.train_list, *Small.test_list, ["batches.meta", ""]):
        content = pickle.dumps({"data": np.full((20, 3072), 7, np.uint8), "labels": [i % 10 for i in range(20)],
                                "label_names": [f"c{i}" for i in range(10)]})
        (base / entry[0]).write_bytes(content)
        entry[1] = hashlib.md5(content).hexdigest()
    Small.meta["md5"] = entry[1]
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Small)
    d = data.load("cifar10", tmp_path, image_size=16)
    assert d.train_images.shape == (20, 3, 16, 16) and (d.train_images == 7).all() and d.tasks[4] == [8, 9]
    (base / "test_batch").write_bytes(b"cut short")
    def offline(*args, **kwargs):
        raise OSError("no network")
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", offline)
    with pytest.raises(data.Problem, match="not complete.*no network"):
        data.load("cifar10", tmp_path)
    with pytest.raises(data.Problem):
        data.load("cifar100", tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------------------- metrics and evaluation

def test_metrics_by_hand():
    A = [[90.0, None, None], [70.0, 80.0, None], [75.0, 60.0, 95.0]]
    assert evaluation.average_accuracy(A) == pytest.approx((75 + 60 + 95) / 3)
    assert evaluation.forgetting(A) == pytest.approx(((90 - 75) + (80 - 60)) / 2)
    better = torch.tensor([[50.0, 0], [70.0, 80.0]])
    assert evaluation.forgetting(better) == -20                 # negative: task 1 got better
    assert evaluation.average_accuracy([[40.0]]) == 40 and math.isnan(evaluation.forgetting([[40.0]]))
    assert A == [[90.0, None, None], [70.0, 80.0, None], [75.0, 60.0, 95.0]]


def test_class_il_and_task_il_by_hand():
    scores = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.2, 0.3, 0.9, 0.0], [0.9, 0.0, 0.5, 0.1], [0.0, 0.0, 0.1, 0.9]])
    class_il, task_il = evaluation.accuracies(scores, torch.tensor([0, 1, 2, 3]), [[0, 1], [2, 3]])
    assert class_il == [50, 50] and task_il == [100, 100]


def test_neural_collapse_measures_vanish_at_collapse():
    p, y = simplex_etf(5, 8), torch.arange(50) % 5
    nc = evaluation.neural_collapse(p[y], y, p)
    assert max(nc["nc1"], nc["nc2"], nc["nc3"]) < 1e-3 and nc["nc4"] == 100
    some = evaluation.neural_collapse(p[y[y < 3]], y[y < 3], p)      # three of the five classes seen
    assert max(some["nc1"], some["nc2"], some["nc3"]) < 1e-3 and evaluation.neural_collapse(p[:1], y[:1], p)["nc2"] is None
    noisy = evaluation.neural_collapse(unit(50, 8, dtype=torch.float32), y, p)
    assert min(noisy["nc1"], noisy["nc2"], noisy["nc3"]) > 0.1 and noisy["nc4"] < 100


def test_probe_is_linear_class_balanced_and_leaves_the_encoder_unchanged():
    torch.manual_seed(0)
    y = torch.tensor([0] * 400 + [1] * 10 + [2] * 10)           # as unbalanced as a task beside a small buffer
    features = F.one_hot(y, 3).float() * 2 + torch.randn(420, 3) + torch.tensor([50.0, 0, 0])
    settings = dict(draws=420, epochs=50, lr=0.1, seed=0)
    weight, bias = evaluation.linear_probe(features, y, 3, **settings)
    right = F.linear(features, weight, bias).argmax(1) == y
    assert min(right[y == k].float().mean() for k in range(3)) > 0.7
    assert torch.equal(weight, evaluation.linear_probe(features, y, 3, **settings)[0])
    net = Encoder(2, 8).train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    h, z = evaluation.encode(net, torch.zeros(7, 3, 8, 8, dtype=torch.uint8), lambda x: data.normalise(x, (0.5,) * 3, (0.2,) * 3), batch=3)
    assert h.shape == (7, 16) and z.shape == (7, 8) and net.training and not h.requires_grad
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_probe_reaches_the_optimum_of_its_loss():
    """Against Newton's method on the class-balanced cross-entropy of the same features, far converged."""
    torch.manual_seed(0)
    y = torch.tensor([0] * 300 + [1] * 60)
    x = torch.randn(360, 2) + torch.stack([y * 1.5, -y * 0.5], 1)
    weight, bias = evaluation.linear_probe(x, y, 2, draws=4000, epochs=60, lr=0.1, seed=0)
    design, t = torch.cat([x, torch.ones(360, 1)], 1).double(), y.double()
    balance, w = torch.where(y == 0, 1 / 300, 1 / 60).double(), torch.zeros(3, dtype=torch.float64)
    for _ in range(30):
        p = (design @ w).sigmoid()
        hessian = design.T @ (design * (balance * p * (1 - p))[:, None])
        w -= torch.linalg.solve(hessian, design.T @ (balance * (p - t)))
    mine = torch.cat([weight[1] - weight[0], (bias[1] - bias[0])[None]]).double()
    assert torch.allclose(mine, w, rtol=0.1, atol=0.05), (mine, w)


def gaussian_task(classes, n=400, F_=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(10, F_, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    y = torch.tensor(classes).repeat(n)
    return centres[y] + torch.randn(len(y), F_, generator=g, dtype=torch.float64) * torch.arange(1, F_ + 1), y


def test_discriminant_equals_the_formula_in_loops():
    h, y = gaussian_task([0, 1, 2], n=30)
    means, S = evaluation.class_statistics(h, y)
    for k in range(3):
        mine = [row for row, label in zip(h.tolist(), y.tolist()) if label == k]
        assert means[k].tolist() == pytest.approx([sum(v) / 30 for v in zip(*mine)])
    loop = [[sum((h[i, a] - means[y[i], a]) * (h[i, b] - means[y[i], b]) for i in range(90)).item() / 90 for b in range(5)] for a in range(5)]
    assert torch.allclose(S, torch.tensor(loop, dtype=torch.float64))
    weight, bias = evaluation.discriminant(means, S, shrink=0.1)
    shrunk = S + 0.1 * sum(S[a, a] for a in range(5)) / 5 * torch.eye(5, dtype=torch.float64)
    inverse = torch.linalg.inv(shrunk)
    for k in range(3):
        wanted = h[7] @ inverse @ means[k] - means[k] @ inverse @ means[k] / 2
        assert (h[7] @ weight[k] + bias[k]).item() == pytest.approx(wanted.item())


def feed(tasks, encoders, ridge=1e-9):
    """The image-free readout over tasks of (features, labels), as encoder t sees them; the classifier at the end."""
    statistics = None
    for t, (h, y) in enumerate(tasks):
        new = evaluation.class_statistics(encoders[t](h), y)
        if t:
            statistics = evaluation.carry(*statistics, *evaluation.fit_map(encoders[t - 1](h), encoders[t](h), ridge))
        statistics = evaluation.join(*statistics, *new) if t else new
    return evaluation.discriminant(*statistics, shrink=1e-9), statistics


def test_image_free_readout_follows_an_encoder_that_moves_affinely_and_is_lda_for_one_that_does_not():
    tasks = [gaussian_task([2 * t, 2 * t + 1], seed=t) for t in range(3)]
    everything = [torch.cat(parts) for parts in zip(*tasks)]
    still = [lambda h: h] * 3
    (weight, bias), statistics = feed(tasks, still)
    at_once = evaluation.class_statistics(*everything)          # one task or three: ordinary LDA
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(statistics, at_once))
    g = torch.Generator().manual_seed(1)
    turns = [torch.linalg.qr(torch.randn(5, 5, generator=g, dtype=torch.float64))[0] for _ in range(3)]
    moving = [lambda h, q=q, k=k: h @ q + k for k, q in enumerate(turns)]
    (moved_weight, moved_bias), _ = feed(tasks, moving)
    test, y = torch.cat([gaussian_task([k], seed=50 + k)[0] for k in range(6)]), torch.arange(6).repeat_interleave(400)
    plain, turned = test @ weight.T + bias, moving[2](test) @ moved_weight.T + moved_bias
    assert torch.equal(plain.argmax(1), turned.argmax(1)) and (plain.argmax(1) == y).float().mean() > 0.5


def test_image_free_residual_covariance_and_singular_features():
    old, _ = gaussian_task([0, 1])
    noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    _, _, R = evaluation.fit_map(old, old + 2 * noise)
    assert torch.allclose(R, 4 * torch.eye(5, dtype=torch.float64), atol=0.7)
    flat = torch.zeros(40, 5)
    flat[:, 0] = torch.arange(40) % 2                           # four dead features, no variance within classes
    for h in (flat, torch.zeros(40, 5), flat.double()):
        means, S = evaluation.class_statistics(h, torch.arange(40) % 2)
        carried = evaluation.carry(means, S, *evaluation.fit_map(h, h))
        assert all(part.isfinite().all() for part in (*carried, *evaluation.discriminant(*carried)))


# ---------------------------------------------------------------------------- the commands, in this process

@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cli(program, *argv):
    """Run train.main or eval.main as the command does: exit status, standard output, standard error."""
    out, err, argv = io.StringIO(), io.StringIO(), [str(a) for a in argv]
    before, sys.argv = sys.argv, [f"{program.__name__}.py", *argv]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
            train.command(program.main)
    finally:
        sys.argv = before
    return stop.value.code or 0, out.getvalue(), err.getvalue()


def run(out, *argv, tiny=TINY):
    status, printed, error = cli(train, "--out", out, *tiny, *argv)
    assert status == 0, error
    return printed


def same(a, b):
    """Bitwise equality of nested checkpoints; settings are left out."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k not in ("settings", "seconds", "views_per_second"))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def same_run(a, b, names=("task1.pt", "task2.pt", "task5.pt")):
    return all(same(data.read(Path(a) / n), data.read(Path(b) / n)) for n in names)


def test_train_then_evaluate(here):
    printed = run("runs/one", "--buffer", 20, "--val-fraction", 0.1)
    assert "task 5/5  epoch   2/2  fnc2" in printed and "hsd" in printed and "views/s" in printed and " left" in printed
    assert "python eval.py runs/one" in printed
    log = [json.loads(line) for line in open("runs/one/log.jsonl")]
    assert [(e["task"], e["epoch"]) for e in log] == [(t, e) for t in range(1, 6) for e in (1, 2)]
    assert all(0 < e["mean_embedding"] < 1 for e in log) and log[0]["alpha"] == 0 and log[0]["chance"] == pytest.approx(math.log(15) * 14 / 15)
    assert json.load(open("runs/one/config.json"))["settings"]["kappa_past"] == 0.01
    state = data.read("runs/one/task3.pt")
    assert len(state["buffer"]["labels"]) == 20 and state["buffer"]["labels"].max() < 4 and state["prototypes"].shape == (10, 16)

    status, printed, error = cli(evaluation, "--epochs", 5, "--lr", 0.2, "--device", "cpu")        # the newest run
    assert status == 0 and "linear classifier" in printed and "image-free, %" in printed and "nearest prototype" in printed, error
    r = json.load(open("runs/one/results.json"))
    for name, kind in itertools.product(("linear", "image_free", "prototype"), ("class_il", "task_il")):
        matrix = r[name][kind]["matrix"]
        assert [[a is None for a in row] for row in matrix] == [[i > t for i in range(5)] for t in range(5)]
        assert r[name][kind]["aa"] == pytest.approx(sum(matrix[4]) / 5)
        assert r[name][kind]["forgetting"] == pytest.approx(evaluation.forgetting(matrix))
        assert all(a <= b for t in range(5) for a, b in zip(r[name]["class_il"]["matrix"][t][:t + 1], r[name]["task_il"]["matrix"][t]))
    assert set(r["nc"]) == {"nc1", "nc2", "nc3", "nc4"} and r["old_images"] == 20 and r["old_classes"] == 8
    assert 1 < r["old_classes_covered"] <= 8 and r["lr"] == 0.2 and r["epochs"] == 5
    assert r["kept_bytes"] == {"linear": 20 * 3 * 8 * 8, "image_free": 4 * (8 * 64 + 64 * 64), "prototype": 0}
    assert "linear 20 images" in printed and "image-free 8 vectors of 64 and one 64 x 64 matrix" in printed
    saved = data.read("runs/one/classifier.pt")["task5"]
    assert saved["linear"]["weight"].shape == saved["image_free"]["means"].shape == (10, 64)
    again = evaluation.discriminant(saved["image_free"]["means"].double(), saved["image_free"]["covariance"].double())
    assert torch.allclose(again[0].float(), saved["image_free"]["weight"], rtol=1e-2, atol=1e-3)
    assert cli(evaluation, "runs/one", "--epochs", 1, "--split", "val", "--device", "cpu")[0] == 0
    assert json.load(open("runs/one/results-val.json"))["split"] == "val"


def test_classifier_without_a_buffer_needs_probe_samples(here):
    run("one", "--epochs", 1)
    results = {}
    for n in (0, 30):
        assert cli(evaluation, "one", "--epochs", 3, "--probe-samples", n)[0] == 0
        results[n] = json.load(open("one/results.json"))
    assert max(results[0]["linear"]["class_il"]["matrix"][4][:4]) < 10      # no old image: 0, but for so few steps
    assert results[0]["old_classes_covered"] == 0 and results[30]["old_classes_covered"] > 4
    assert results[30]["prototype"] == results[0]["prototype"] and results[30]["image_free"] == results[0]["image_free"]


@pytest.mark.parametrize("buffer", [0, 6])
def test_evaluation_after_a_task_sees_its_images_and_the_kept_ones_alone(here, monkeypatch, buffer):
    """A spy on every image that an encoder gets: which training images are seen, with which network, for which readout."""
    run("one", "--tasks", 5, "--buffer", buffer)
    d = data.load("shapes", image_size=8, limit_per_class=6)
    label_of = {image.numpy().tobytes(): label for image, label in zip(d.train_images, d.train_labels.tolist())}
    real, seen = evaluation.encode, []
    def spy(net, images, view, **kw):
        crops = not torch.equal(view(images), view(images))
        found = [label_of.get(image.numpy().tobytes()) for image in images]
        if None not in found:                                   # training images; test images are others
            seen.append((crops, len(images), sorted(set(found))))
        return real(net, images, view, **kw)
    monkeypatch.setattr(evaluation, "encode", spy)
    evaluation.evaluate("one", epochs=1, probe_samples=None if buffer else 6)
    plain = [labels for crops, _, labels in seen if not crops]
    assert plain == [[0, 1]] + [[2 * t, 2 * t + 1] for t in range(1, 5) for _ in range(2)]     # image-free: task t, new and old network
    t = 0
    for crops, n, labels in seen:
        if crops and labels[0] >= 2 * t and n == 12:            # the task's own
            t = labels[0] // 2
            assert labels == [2 * t, 2 * t + 1]
        elif crops:                                             # old images, no more than are kept
            assert n <= 6 and max(labels) < 2 * t
    assert t == 4


def test_joint_training_is_scored_over_the_datasets_own_tasks(here):
    run("joint", "--tasks", 1)
    assert cli(evaluation, "joint", "--epochs", 2)[0] == 0
    r = json.load(open("joint/results.json"))
    assert len(r["linear"]["task_il"]["matrix"][0]) == 5 and r["linear"]["task_il"]["forgetting"] is None
    assert r["linear"]["task_il"]["aa"] > r["linear"]["class_il"]["aa"] and r["kept_bytes"]["image_free"] == 0


def test_supcon_has_no_measures_by_prototypes(here):
    run("co2l", "--plasticity", "supcon", "--stability", "ird", "--tasks", 2)
    status, printed, error = cli(evaluation, "co2l", "--epochs", 1)
    assert status == 0 and "NC2" in printed and "NC3" not in printed and "nearest prototype" not in printed, error


def test_several_runs_are_averaged_and_drawn(here):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    for seed in (0, 1):
        run(f"s{seed}", "--seed", seed, "--tasks", 2)
    status, printed, error = cli(evaluation, "s0", "s1", "--epochs", 2)
    assert status == 0 and "python results/plot.py s0 s1 --out figures" in printed, error
    aa = [json.load(open(f"s{s}/results.json"))["linear"]["class_il"]["aa"] for s in (0, 1)]
    assert f"{sum(aa) / 2:.1f} ± {abs(aa[0] - aa[1]) / 2 ** 0.5:.1f}" in printed and "n = 2" in printed
    done = subprocess.run([sys.executable, ROOT / "results" / "plot.py", "s0", "s1", "--out", "figures"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all((here / "figures" / f"{n}.png").stat().st_size > 5000 for n in ("accuracy", "tasks", "embeddings"))


@pytest.mark.parametrize("package", ["matplotlib", "sklearn"])
def test_plots_without_their_packages_say_so(here, package):
    code = f"import sys; sys.modules['{package}'] = None; sys.argv = ['plot.py', 'x']; import runpy; runpy.run_path({str(ROOT / 'results' / 'plot.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "pip install matplotlib scikit-learn" in done.stderr and "Traceback" not in done.stderr


# Every flag of train.py with a value, and whether it changes what is learned in two tasks.
FLAGS = {
    "--plasticity supcon": True, "--stability ird": True, "--stability sprd": True, "--stability none": True,
    "--no-pseudo-replay": True, "--plasticity-weight 3": True, "--stability-weight 2": True, "--gamma 4": True, "--tau 0.3": True,
    "--e0 0": True, "--kappa-past 0.2": True, "--kappa-current 0.1": True, "--zeta-past 0.3": True, "--zeta-current 0.4": True,
    "--epochs-first 1": True, "--epochs 3": True, "--batch-size 4": True, "--lr 0.02": True, "--dim 20": True, "--width 9": True,
    "--image-size 12": True, "--prototypes 14": True, "--limit-per-class 5": True, "--val-fraction 0.2": True, "--seed 1": True,
    "--buffer 5": True, "--tasks 5": True, "--amp": True, "--predictor": True, "--alpha-max 0.1": True,
    "--dataset shapes": False, "--data-dir elsewhere": False, "--device auto": False, "--save-every 0": False,
}


def test_every_flag_does_something(here):
    short = "--tasks 2".split() + TINY
    run("base", tiny=short)
    base = data.read("base/task2.pt")["net"]
    for number, (flag, changes) in enumerate(FLAGS.items()):
        words = flag.split()
        kept = [w for i, w in enumerate(short) if words[0] not in (w, short[i - 1] if i else "")]
        run(f"f{number}", *words, tiny=kept)
        assert same(base, data.read(f"f{number}/task2.pt")["net"]) is not changes, flag
    tested = {flag.split()[0] for flag in FLAGS} | {"--out", "--resume", "--init", "--compile", "--help"}
    assert tested == {s for action in train.build_parser()._actions for s in action.option_strings if s.startswith("--")}


def test_presets_fill_only_what_is_unset():
    parse = lambda line: train.parse(line.split())
    paper = parse("--dataset cifar10 --buffer 0")
    assert (paper.epochs_first, paper.epochs, paper.batch_size, paper.lr, paper.dim, paper.width) == (500, 100, 512, 0.5, 128, 64)
    assert (paper.gamma, paper.tau, paper.e0, paper.kappa_past, paper.kappa_current, paper.zeta_past) == (1, 0.5, 30, 0.01, 0.2, 0.01)
    assert paper.plasticity_weight == pytest.approx(0.5 / 0.07) and paper.out == "runs/cifar10-buffer0-seed0"
    tiny = parse("--dataset tinyimagenet")
    assert (tiny.tasks, tiny.epochs, tiny.lr, tiny.dim, tiny.e0, tiny.kappa_past, tiny.gamma) == (10, 50, 0.1, 256, 20, 0.1, 4)
    assert parse("--dataset cifar100").zeta_past == 0.1
    mine = parse("--dataset cifar10 --gamma 0 --epochs 20 --plasticity-weight 0")
    assert (mine.gamma, mine.plasticity_weight, mine.e0) == (0, 0, 6)       # e0 keeps its share of the epochs


def test_learning_rate_warms_up_then_follows_the_cosine():
    rates = [train.learning_rate(e / 100, 100, 0.5) for e in range(101)]
    assert rates[0] == 0.01 and max(rates) == rates[10] and rates[100] == pytest.approx(0.0005)
    assert rates[50] == pytest.approx(0.25025) and rates[5] == pytest.approx((0.01 + rates[10]) / 2)
    assert train.learning_rate(0.05, 10, 0.5) < train.learning_rate(0.1, 10, 0.5)      # at most a tenth of a short task
    assert train.learning_rate(0, 500, 0.02) == pytest.approx(0.002)


# ---------------------------------------------------------------------------- same seed, same result; nothing lost

def test_one_seed_one_result_and_the_buffer_does_not_move_task_1(here):
    run("a"), run("b"), run("other", "--seed", 1), run("buffer", "--buffer", 7)
    assert same_run("a", "b") and not same_run("a", "other")
    assert same(data.read("a/task1.pt")["net"], data.read("buffer/task1.pt")["net"])
    assert not same(data.read("a/task2.pt")["net"], data.read("buffer/task2.pt")["net"])


def test_init_ends_where_training_from_scratch_ends(here):
    run("a"), run("a-ird", "--stability", "ird", "--buffer", 5)
    status, printed, error = cli(train, "--init", "a", "--out", "b", "--stability", "ird", "--buffer", 5)    # the rest is a's
    assert status == 0 and "task 1/5" not in printed, error
    assert same_run("a-ird", "b")
    Path("a").rename("moved")                                   # the new run does not need it any more
    assert cli(train, "--resume", "--out", "b")[0] == 0 and cli(evaluation, "b", "--epochs", 1)[0] == 0
    Path("moved").rename("a")
    status, _, error = cli(train, "--init", "a", "--out", "c", "--width", 9, "--device", "cpu")
    assert status == 2 and "--width 9, the run has 8" in error and not Path("c").exists()
    assert "--seed 4, the run has 0" in cli(train, "--init", "a", "--out", "c", "--seed", 4)[2]
    run("a-predictor", "--predictor"), cli(train, "--init", "a", "--out", "d", "--predictor")
    assert same_run("a-predictor", "d")
    run("late", "--e0", 0)
    assert train.parse(["--init", "late"]).e0 == 0 and train.parse(["--init", "late", "--epochs", "10"]).e0 == 3        # its share again
    assert train.parse(["--resume", "--out", "late", "--epochs", "2"]).e0 == 0


def test_interrupted_by_ctrl_c_and_resumed_with_the_runs_own_settings(here, monkeypatch):
    run("whole", "--buffer", 5, "--predictor")
    real, calls = train.train_epoch, itertools.count(1)
    def interrupted(*args):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return real(*args)
    monkeypatch.setattr(train, "train_epoch", interrupted)
    status, printed, _ = cli(train, "--out", "cut", *TINY, "--buffer", 5, "--predictor", "--save-every", 0)
    assert status == 130 and "go on with: python train.py --resume --out cut" in printed
    saved = Path("cut/last.pt").read_bytes()
    for flag, value, has in (("--width", 16, 8), ("--buffer", 0, 5), ("--amp", "", False), ("--no-pseudo-replay", "", False)):
        status, _, error = cli(train, "--resume", "--out", "cut", *([flag, value] if value != "" else [flag]))
        assert status == 2 and flag in error and f"the run has {has}" in error
    status, _, error = cli(train, "--out", "cut", *TINY)
    assert status == 2 and "holds a run already" in error and Path("cut/last.pt").read_bytes() == saved
    Path("left").mkdir()
    Path("left/last.pt").write_bytes(saved)                     # not taken for the new run's own
    assert "holds a run already (last.pt)" in cli(train, "--out", "left", *TINY)[2]
    assert train.parse(["--resume", "--out", "cut", "--save-every", "3"]).save_every == 3          # what changes no result may change
    assert cli(train, "--resume", "--out", "cut", "--device", "cpu")[0] == 0
    assert same_run("whole", "cut") and len(open("cut/log.jsonl").readlines()) == 10
    weights = [data.read(f"cut/task{t}.pt")["predictor"]["layers.0.weight"] for t in (1, 2, 5)]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])     # kept across tasks, and learning
    assert cli(train, "--resume", "--out", "cut")[0] == 0 and same_run("whole", "cut")         # a finished run stays as it is


KILL = """
import os, signal, sys
sys.path.insert(0, {root!r})
import data, train
module, name = {where!r}.split(".")
module = {{"os": os, "train": train}}[module]
real, left = getattr(module, name), [{count}]
def die(*args, **kwargs):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
setattr(module, name, die)
sys.argv = ["train.py"] + {argv!r}
train.command(train.main)
"""


def test_a_run_killed_at_any_moment_ends_where_an_uninterrupted_one_ends(here):
    """SIGKILL inside a step, between tasks, while a file is written and before its renaming; then at random times."""
    flags = ["--buffer", "5", *TINY, "--save-every", "0"]
    run("whole", *flags, tiny=[])
    places = [("os.fsync", 1), ("train.train_step", 1), ("os.replace", 2), ("train.make_task", 2), ("os.fsync", 4),
              ("train.train_step", 3), ("os.replace", 4)]
    dice, kills = random.Random(0), 0
    env = dict(os.environ, OMP_NUM_THREADS=str(torch.get_num_threads()))
    for number in range(40):
        argv = (["--resume"] if Path("cut/config.json").exists() else []) + ["--out", "cut", *flags]
        if number < len(places):
            code = KILL.format(root=str(ROOT), where=places[number][0], count=places[number][1], argv=argv)
            process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL)
        else:
            process = subprocess.Popen([sys.executable, ROOT / "train.py", *argv], env=env, stdout=subprocess.DEVNULL)
            if number < len(places) + 4:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(dice.uniform(1.5, 5))
                process.kill()
        status = process.wait()
        kills += status == -signal.SIGKILL
        assert status in (0, -signal.SIGKILL)
        if status == 0:
            break
    assert kills >= 7 and same_run("whole", "cut") and not list(Path("cut").glob("*.tmp"))
    assert [json.loads(a)["plasticity"] for a in open("cut/log.jsonl")] == [json.loads(a)["plasticity"] for a in open("whole/log.jsonl")]


def test_a_kill_between_two_spaced_out_saves_costs_those_epochs_and_nothing_else(here, monkeypatch):
    run("whole", "--epochs", 6)
    clock, real, calls = itertools.count(step=60), train.train_epoch, itertools.count(1)
    monkeypatch.setattr(train.time, "monotonic", lambda: next(clock))       # a minute between two looks at the clock
    def killed(*args):
        if next(calls) == 7:                                    # epoch 5 of task 2, before its end
            raise KeyboardInterrupt
        return real(*args)
    monkeypatch.setattr(train, "train_epoch", killed)
    assert cli(train, "--out", "cut", *TINY, "--epochs", 6, "--save-every", 3)[0] == 130
    state = data.read("cut/last.pt")
    assert (state["task"], state["epoch"]) == (2, 2) and len(open("cut/log.jsonl").readlines()) == 6
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert cli(train, "--resume", "--out", "cut")[0] == 0 and same_run("whole", "cut")
    assert [json.loads(a)["epoch"] for a in open("cut/log.jsonl")] == [json.loads(a)["epoch"] for a in open("whole/log.jsonl")]


def test_a_full_disk_stops_the_run_with_a_sentence_and_keeps_the_last_checkpoint(here):
    run("whole", "--buffer", 60)
    limit = sum(os.path.getsize(f"whole/task{t}.pt") for t in (4, 5)) // 2      # task 4 fits, the fuller buffer of task 5 does not
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); import sys; sys.path.insert(0, {str(ROOT)!r})\n" \
           f"import train; sys.argv = ['train.py', '--out', 'short', '--buffer', '60', *{TINY!r}]; train.command(train.main)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and data.read("short/task4.pt")["task"] == 4 and not list(Path("short").glob("*.tmp"))
    assert cli(train, "--resume", "--out", "short")[0] == 0 and same_run("whole", "short")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil-ran",)


def test_foreign_and_malicious_files_are_refused_and_run_nothing(here):
    run("one", "--tasks", 2)
    good = Path("one/task1.pt").read_bytes()
    torch.save({"net": Evil()}, "evil.pt")
    contents = {"malicious": Path("evil.pt").read_bytes(), "pickle": pickle.dumps(Evil()), "empty": b"", "foreign": b"hello" * 100,
                "truncated": good[:len(good) // 2], "other": (torch.save([1], "list.pt"), Path("list.pt").read_bytes())[1]}
    for name, content in contents.items():
        Path("one/task1.pt").write_bytes(content)
        for program, argv in ((evaluation, ["one"]), (train, ["--init", "one", "--out", "two", "--device", "cpu"])):
            status, _, error = cli(program, *argv)
            assert status == 2 and "task1.pt is not a checkpoint of this program" in error, name
    assert not Path("evil-ran").exists() and not Path("two/last.pt").exists()
    for text in ("{", "[]", "{}", '{"settings": []}', '{"settings": {}}', '{"settings": {"dataset": "imagenet"}}', '{"settings": {"dataset": "shapes"}}'):
        Path("one/config.json").write_text(text)
        for program, argv in ((evaluation, ["one"]), (train, ["--resume", "--out", "one"])):
            status, _, error = cli(program, *argv)
            assert status == 2 and "config.json is damaged, or not of this version of the program" in error, text


def test_trouble_while_training_is_told(here, monkeypatch):
    monkeypatch.setattr(train, "fnc2_loss", lambda z, *a, **k: z.sum() * math.nan)
    status, _, error = cli(train, "--out", "nan", *TINY)
    assert status == 2 and "not finite in task 1, epoch 1: fnc2 nan, hsd 0.0" in error and "--resume would go the same way" in error
    assert not list(Path("nan").glob("*.pt"))
    monkeypatch.setattr(train, "fnc2_loss", lambda z, *a, **k: z.sum() * 0 + math.log(15))     # chance of 8 images
    assert "was not learned" in run("flat")
    monkeypatch.setattr(train, "fnc2_loss", lambda z, *a, **k: z.sum() * 0 + 1.0)
    assert "was not learned" not in run("fine")


def test_a_collapse_to_one_point_is_told_at_the_end_of_its_task(here, monkeypatch):
    assert "collapsed" not in run("fine")
    real = train.Encoder.forward
    monkeypatch.setattr(train.Encoder, "forward", lambda self, x: F.normalize(real(self, x) * 1e-3 + 1, dim=1))
    assert re.search("task 5 ends with all views at one point .*: the network has collapsed", run("point"))


def test_long_runs_and_too_little_memory_are_told(here, monkeypatch):
    real = train.train_epoch
    monkeypatch.setattr(train, "train_epoch", lambda *args: real(*args) | {"views_per_second": 1e-3})
    assert re.search(r"note: at this speed the run takes [\d.]+ days; a GPU is faster", run("slow", "--tasks", 1))
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        def full(*args):
            raise error
        monkeypatch.setattr(train, "train_epoch", full)
        status, _, message = cli(train, "--out", f"full{type(error).__name__}", *TINY)
        assert status == 2 and "error: too little memory (" in message and "a smaller --batch-size or --image-size, or --amp, needs less" in message and len(message.splitlines()) == 1
    def other(*args):
        raise RuntimeError("a bug")
    monkeypatch.setattr(train, "train_epoch", other)
    with pytest.raises(RuntimeError, match="a bug"):            # what is not the user's to mend is not hidden
        train.main(["--out", "bug", *TINY])


def test_a_new_run_leaves_other_peoples_files_alone(here):
    Path("a").mkdir()
    for name in ("notes.tmp", "draft.2.tmp", "last.pt.123.tmp", "config.json.9.tmp"):
        Path("a", name).write_text("x")
    run("a", "--tasks", 1, "--epochs-first", 1)
    assert sorted(path.name for path in Path("a").glob("*.tmp")) == ["draft.2.tmp", "notes.tmp"]


def test_a_dataset_of_ones_own_needs_a_row_and_a_loader(here, monkeypatch):
    """As the README says under "Hack it"."""
    monkeypatch.setitem(data.DATASETS, "mine", data.DATASETS["shapes"])
    monkeypatch.setitem(data.LOADERS, "mine", data.LOADERS["shapes"])
    assert "mine: 5 tasks" in run("a", "--dataset", "mine", "--epochs-first", 1, "--epochs", 1, "--e0", 0, "--dim", 16)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_can_be_resumed_without_compiling(here):
    run("c", "--compile", "--tasks", 2), run("plain", "--tasks", 2)
    assert data.read("c/task2.pt")["net"].keys() == data.read("plain/task2.pt")["net"].keys()
    a, b = (json.loads(open(f"{name}/log.jsonl").readline())["plasticity"] for name in ("c", "plain"))
    assert a == pytest.approx(b, rel=1e-3)                      # later epochs drift apart
    assert cli(train, "--resume", "--out", "c")[0] == 0


def test_profile_of_a_step(here):
    before = set(Path().iterdir())
    for extra in ([], ["--amp"], ["--stability", "none"]):
        done = subprocess.run([sys.executable, ROOT / "results" / "speed.py", "profile", *TINY, "--buffer", "4", "--steps", "2", *extra], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for word in ("augmentation", "student forward", "loss", "backward", "optimizer", "whole step", "bare network", "ratio", "GB", "hours"):
            assert word in done.stdout
        assert ("teacher forward" in done.stdout) == ("none" not in extra)
    assert set(Path().iterdir()) == before


def test_each_task_alone(here):
    done = subprocess.run([sys.executable, ROOT / "results" / "alone.py", *TINY, "--epochs-first", "1"], capture_output=True, text=True)
    assert done.returncode == 0 and len(json.load(open("runs/alone/shapes.json"))["accuracy"]) == 5, done.stderr
    assert json.load(open("runs/alone/shapes-task3/config.json"))["settings"]["classes"] == ["ring", "bar"]


def test_what_the_loop_hands_to_the_losses(here, monkeypatch):
    """Current views as anchors, P_1:t-1 to FNC2, P_1:t and alpha of Eq. 10 to HSD."""
    seen, distilled = [], []
    def spy_hsd(z, z_past, prototypes, alpha, **kw):
        distilled.append((len(prototypes), alpha))
        return hsd_loss(z, z_past, prototypes, alpha, **kw)
    monkeypatch.setattr(train, "hsd_loss", spy_hsd)
    def spy(z, y, prototypes, old, anchors, **kw):
        seen.append((y, 0 if old is None else len(old), anchors))
        return fnc2_loss(z, y, prototypes, old, anchors, **kw)
    monkeypatch.setattr(train, "fnc2_loss", spy)
    run("a", "--buffer", 9, "--epochs-first", 1, "--epochs", 2, "--e0", 1)
    assert list(dict.fromkeys(distilled)) == [(2 * task, alpha) for task in (2, 3, 4, 5) for alpha in (0.0, 0.5)]
    logged = [json.loads(line) for line in open("a/log.jsonl")]
    assert [entry["alpha"] for entry in logged[1:]] == [0.0, 0.5] * 4
    for y, old, anchors in seen:
        task = y.max().item() // 2
        assert old == 2 * task and torch.equal(anchors, y >= 2 * task) and torch.equal(y[:len(y) // 2], y[len(y) // 2:])
    assert any((y < 2).any() for y, old, _ in seen if old == 8)                                # the buffer is replayed


def test_a_step_follows_the_weighted_sum_of_both_losses(here):
    """Eq. 6 with its weights, written out: the gradient that train_step leaves in the network."""
    c = train.parse("--plasticity-weight 3 --stability-weight 40 --predictor".split())
    images, labels = data.load_shapes(None, 16)[0][:6], torch.tensor([2, 3, 2, 3, 2, 3])
    recipe = {key: data.DATASETS["shapes"][key] for key in ("mean", "std", "crop", "blur")}
    task = SimpleNamespace(old=2, seen=4, prototypes=simplex_etf(10, c.dim), recipe=recipe)
    net, teacher, again = (train.make_net(SimpleNamespace(seed=seed, width=8, dim=c.dim), "cpu") for seed in (0, 1, 0))
    predictor, same_predictor = (train.make_net(SimpleNamespace(seed=0, dim=c.dim), "cpu", predictor=True) for _ in range(2))
    generator, teacher = torch.Generator().manual_seed(1), frozen_copy(teacher)
    train.train_step(images, labels, task, net.train(), teacher, predictor, train.make_optimizer(c, net), c, generator, 0.5)
    generator.manual_seed(1)
    x, y, p = data.augment(images.repeat(2, 1, 1, 1), generator, **recipe), labels.repeat(2), task.prototypes
    z, z_past = again.train()(x), teacher(x)
    (3 * fnc2_loss(z, y, p, p[:2], tau=c.tau, gamma=c.gamma)
     + 40 * hsd_loss(same_predictor(z), z_past, p[:4], 0.5, kappa_current=c.kappa_current, kappa_past=c.kappa_past, zeta_current=c.zeta_current,
                     zeta_past=c.zeta_past)).backward()
    largest = max(parameter.grad.abs().max() for parameter in again.parameters())
    for a, b in zip(net.parameters(), again.parameters()):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5 * largest)


def test_steps_learn(here):
    """Steps on 40 drawn images of the first task: the nearest prototype of new views of them is the right one."""
    d = data.load("shapes", image_size=16, limit_per_class=20)
    c = train.parse([])
    task, generator = train.make_task(d, 1, ReservoirBuffer(0), simplex_etf(10, c.dim)), torch.Generator().manual_seed(0)
    net = train.make_net(c, "cpu").train()
    optimizer = train.make_optimizer(c, net)
    for _ in range(150):
        train.train_step(task.images, task.labels, task, net, None, None, optimizer, c, generator, 0.0)
    z = net.eval()(data.augment(task.images, generator, **d.recipe))
    assert ((z @ task.prototypes[:2].T).argmax(1) == task.labels).float().mean() > 0.75         # chance: 0.5


# ---------------------------------------------------------------------------- several processes

def torchrun(*argv, processes=2):
    """As `torchrun --nproc-per-node 2`, on the CPU."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    return subprocess.run(launcher + [str(a) for a in argv], capture_output=True, text=True, env=env, timeout=300)


ONE_STEP = """
import sys, torch, torch.nn.functional as F, torch.distributed as dist
from torch.distributed.nn.functional import all_reduce
import data, model, train
from buffer import ReservoirBuffer
from etf import simplex_etf

def forward(self, x):                                           # BatchNorm over the views of all processes, on the CPU
    dims, C = [d for d in range(x.ndim) if d != 1], x.shape[1]
    sums = torch.cat([x.sum(dims), (x * x).sum(dims), x.new_tensor([x.numel() / C])])
    sums = all_reduce(sums) if train.processes() > 1 else sums
    mean, square = sums[:C] / sums[-1], sums[C:-1] / sums[-1]
    shape = [1, C] + [1] * (x.ndim - 2)
    scale = self.weight / (square - mean ** 2 + self.eps).sqrt()
    return (x - mean.view(shape)) * scale.view(shape) + self.bias.view(shape)

torch.nn.modules.batchnorm._BatchNorm.forward = forward
model.Encoder.project = lambda self, h: F.normalize(self.projector(h), dim=1)              # float64 throughout
model.Predictor.forward = lambda self, z: F.normalize(self.layers(z), dim=1)
real = data.augment
train.augment = lambda *args, **kw: real(*args, **kw).double()
if train.processes() > 1:
    dist.init_process_group("gloo")
c, d, cpu = train.parse(["--plasticity-weight", "3", "--predictor"]), data.load("shapes", image_size=16, limit_per_class=20), torch.device("cpu")
buffer = ReservoirBuffer(3)
buffer.add(d.train_images[:40], d.train_labels[:40])
task = train.make_task(d, 2, buffer, simplex_etf(10, c.dim).double())
net, teacher, predictor = (train.make_net(c, cpu, predictor=p).double() for p in (False, False, True))
teacher.projector[0].weight.data.add_(0.1)
optimizer = train.make_optimizer(c, net, predictor)
batch = torch.tensor([0, 30, 1, 40, 41, 42])                    # three old images: more anchors in one share than in the other
train.train_step(task.pool_images[batch], task.pool_labels[batch], task, net.train(), model.frozen_copy(teacher), predictor, optimizer, c,
                 torch.Generator().manual_seed(1), 0.5)
if train.rank() == 0:
    torch.save([p.grad for m in (net, predictor) for p in m.parameters()], sys.argv[1])
if train.processes() > 1:
    dist.barrier()
    dist.destroy_process_group()                                # left to the interpreter's end it may abort
"""


def test_two_processes_have_the_gradient_of_one(here):
    Path("step.py").write_text(ONE_STEP)
    done = torchrun("step.py", "two.pt")
    assert done.returncode == 0, done.stderr
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    subprocess.run([sys.executable, "step.py", "one.pt"], check=True, env=env)
    one, two = torch.load("one.pt"), torch.load("two.pt")
    largest = max(g.abs().max() for g in one)
    assert len(one) == len(two) > 60 and largest > 0.1
    assert max((a - b).abs().max() for a, b in zip(one, two)) < 1e-11 * largest


def test_a_run_by_torchrun_is_evaluated_and_resumed_by_one_process_and_back(here):
    done = torchrun(ROOT / "train.py", "--out", "two", *TINY, "--buffer", 7)
    assert done.returncode == 0 and done.stdout.count("task 5/5  epoch   2/2") == 1 and "normalises by its own share" in done.stdout, done.stderr
    assert json.load(open("two/config.json"))["processes"] == 2 and len(open("two/log.jsonl").readlines()) == 10
    assert cli(evaluation, "two", "--epochs", 1)[0] == 0
    for name in ("task5.pt", "task4.pt"):
        (here / "two" / name).unlink()
    status, printed, error = cli(train, "--resume", "--out", "two")
    assert status == 0 and "task 4/5" in printed and "task 3/5" not in printed, error
    (here / "two" / "task5.pt").unlink()
    done = torchrun(ROOT / "train.py", "--resume", "--out", "two")
    assert done.returncode == 0 and "task 5/5" in done.stdout and "task 4/5" not in done.stdout, done.stderr
    assert [json.loads(line)["task"] for line in open("two/log.jsonl")] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_trouble_in_one_process_ends_all_with_one_sentence(here):
    done = torchrun(ROOT / "train.py", "--out", "odd", *TINY, "--batch-size", 9)
    assert done.returncode and done.stderr.count("train.py: error:") == 1 and "--batch-size 9 is not a multiple of the 2 processes" in done.stderr
    Path("nan.py").write_text("import train\nreal = train.fnc2_loss\n"
                              "train.fnc2_loss = lambda *a, **k: real(*a, **k) * (float('nan') if train.rank() else 1)\ntrain.command(train.main)\n")
    done = torchrun("nan.py", "--out", "nan", *TINY, "--limit-per-class", 12)
    assert done.returncode and done.stderr.count("nan.py: error: the loss is not finite in task 1, epoch 1") == 1
    assert not list(Path("nan").glob("*.pt"))


# ---------------------------------------------------------------------------- results/baselines.py

@pytest.fixture
def baselines(here, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    import baselines
    return baselines


def learner_of(baselines, method, buffer=12, **weights):
    c = train.parse(f"--width 8 --image-size 8 --buffer {buffer} --batch-size 8 --limit-per-class 20 --dim 16".split())
    d = train.load_data(c, "cpu")
    m = SimpleNamespace(method=method, **baselines.METHODS[method] | weights)
    learner = baselines.LEARNERS[method](c, m, d, torch.device("cpu"))
    learner.per_task = 2
    tasks = [(d.train_images[d.train_labels // 2 == t], d.train_labels[d.train_labels // 2 == t]) for t in range(5)]
    sizes, real = [], learner.logits
    learner.logits = lambda x, net=None: (sizes.append(len(x)), real(x, net))[1]        # views in every forward pass
    return learner, tasks, sizes


def test_baseline_views_are_padded_crops_and_flips(baselines):
    images = torch.randint(1, 256, (50, 3, 16, 16), dtype=torch.uint8)
    views = baselines.crop_flip(images, torch.Generator().manual_seed(0), torch.zeros(3), torch.ones(3)) * 255
    padded = F.pad(images, (2, 2, 2, 2)).float()
    for view, image in zip(views, padded):                      # each is one of 5 x 5 crops, flipped or not
        crops = [image[:, a:a + 16, b:b + 16] for a in range(5) for b in range(5)]
        assert sum(torch.allclose(view, x, atol=1e-3) for crop in crops for x in (crop, crop.flip(2))) == 1
    assert len({view.numpy().tobytes() for view in views}) == 50


def test_er_replays_in_one_forward_and_keeps_a_uniform_sample(baselines):
    learner, tasks, sizes = learner_of(baselines, "er")
    learner.step(*(part[:8] for part in tasks[0]))
    learner.step(*(part[8:16] for part in tasks[0]))
    assert sizes == [8, 16] and len(learner.memory) == 12
    kept = torch.zeros(40)
    for seed in range(1500):
        memory = baselines.Memory(4, torch.Generator().manual_seed(seed))
        for part in torch.arange(40).split(8):
            memory.add(part, part)
        kept[memory.rows[0]] += 1
    assert ((kept - 150) ** 2 / 135).sum() < 75                 # expected 150 each: chi-square of 40 cells


def test_der_stores_the_logits_of_its_view_and_never_refreshes_them(baselines):
    learner, tasks, sizes = learner_of(baselines, "der", buffer=8)
    outs, real = [], learner.logits
    learner.logits = lambda x, net=None: outs.append(real(x, net)) or outs[-1]
    learner.step(*(part[:8] for part in tasks[0]))
    assert torch.equal(learner.memory.rows[2], outs[0].detach())
    before = learner.memory.rows[2].clone()
    learner.memory.capacity = 0                                 # takes nothing more
    learner.step(*(part[8:16] for part in tasks[0]))
    assert torch.equal(learner.memory.rows[2], before) and len(outs) == 3 and sizes == [8, 8, 8]        # passes of their own
    gradients = []
    for alpha in (0.0, 5.0):                                    # the stored logits pull
        learner, tasks, _ = learner_of(baselines, "der", buffer=8, alpha=alpha)
        learner.memory.add(*(part[:8] for part in tasks[0]), torch.full((8, 10), 9.0))
        learner.step(*(part[8:16] for part in tasks[0]))
        gradients.append(learner.net.head.bias.grad.clone())
    assert (gradients[1] - gradients[0]).max() < 0              # a step up for every logit


def test_derpp_adds_a_second_independent_draw_with_labels(baselines):
    learner, tasks, sizes = learner_of(baselines, "derpp", beta=0.0)
    plain, _, der_sizes = learner_of(baselines, "der")
    for one in (learner, plain):
        one.step(*(part[:8] for part in tasks[0])), one.step(*(part[8:16] for part in tasks[0]))
    assert sizes == [8, 8, 8, 8] and der_sizes == [8, 8, 8]


def test_icarl_herds_cuts_and_distils(baselines):
    learner, tasks, _ = learner_of(baselines, "icarl", buffer=12)
    learner.step(*(part[:8] for part in tasks[0]))
    learner.finish(*tasks[0])
    assert [len(e) for e in learner.exemplars] == [6, 6]
    first = [e.clone() for e in learner.exemplars]
    images = tasks[0][0][tasks[0][1] == 0]
    h, chosen = learner.features(images), learner.features(first[0])
    random_means = [h[torch.randperm(20, generator=torch.Generator().manual_seed(s))[:6]].mean(0) for s in range(50)]
    assert (chosen.mean(0) - h.mean(0)).norm() < min((mean - h.mean(0)).norm() for mean in random_means)
    scores = learner.scores(tasks[0][0])
    assert scores.shape == (40, 10) and scores[:, 2:].isinf().all()
    learner.old = 2
    pool, owner = learner.pool(tasks[1][0].repeat(9, 1, 1, 1), tasks[1][1].repeat(9))
    assert len(pool) == 360 + 12 and owner[-12:].tolist() == [0] * 6 + [1] * 6           # every image once, old or new
    targets, real = [], F.binary_cross_entropy_with_logits
    def spy(out, target):
        targets.append(target)
        return real(out, target)
    baselines.F.binary_cross_entropy_with_logits = spy
    try:
        learner.step(*(part[:8] for part in tasks[1]))
    finally:
        baselines.F.binary_cross_entropy_with_logits = real
    assert targets[0].shape[1] == 4 and ((targets[0][:, :2] > 0) & (targets[0][:, :2] < 1)).all()       # the old network's sigmoids
    assert set(targets[0][:8, 2:].flatten().tolist()) == {0.0, 1.0}
    learner.finish(*tasks[1])
    assert [len(e) for e in learner.exemplars] == [3] * 4 and torch.equal(learner.exemplars[0], first[0][:3])


def test_gem_projects_onto_the_cone_of_its_constraints(baselines):
    torch.manual_seed(0)
    for count in (1, 2, 4):
        G, g = torch.randn(count, 30), torch.randn(30)
        g = g - 2 * G.sum(0)                                    # violates them
        out = baselines.gem_project(g, G, 0.0)
        assert (G @ out > -1e-2).all() and (G @ g).min() < 0
        A, b, v = (G @ G.T + 1e-3 * torch.eye(count)).double(), (G @ g).double(), torch.zeros(count, dtype=torch.float64)
        for _ in range(20000):                                  # projected gradient descent, far converged
            v = (v - 0.005 * (A @ v + b)).clamp(min=0)
        assert torch.allclose(out, g + G.T @ v.float(), atol=1e-2)
    learner, tasks, _ = learner_of(baselines, "gem", buffer=20)
    learner.finish(*tasks[0])
    assert len(learner.memory) == 4                             # 20 // 5 of each task
    learner.step(*(part[:8] for part in tasks[1]))


def test_gss_lets_in_only_gradients_unlike_the_stored_ones(baselines):
    learner, tasks, _ = learner_of(baselines, "gss", buffer=4)
    images, labels = (part[:8] for part in tasks[0])
    learner.step(images[:4], labels[:4])                        # fills the memory
    assert torch.equal(learner.memory.rows[0], images[:4]) and learner.memory.rows[2].tolist() == pytest.approx([0.1] * 4)
    G, before = learner.gradients(images, labels), [v.clone() for v in learner.net.state_dict().values()]
    learner.net.eval()                                          # one by one, by autograd
    for g, x, y in zip(G, data.normalise(images, **learner.colours), labels):
        loss = F.cross_entropy(learner.net(x[None]), y[None])
        assert torch.allclose(g, torch.cat([p.flatten() for p in torch.autograd.grad(loss, learner.parameters.values())]), atol=1e-5)
    learner.net.train()
    assert all(torch.equal(a, b) for a, b in zip(before, learner.net.state_dict().values()))
    directions = {}
    learner.gradients = lambda x, y: torch.stack([directions[image.numpy().tobytes()] for image in x])
    for sign, moved in ((1.0, False), (-1.0, True)):            # alike: a score of 2; opposite: of 0
        directions.update({image.numpy().tobytes(): torch.ones(5) for image in images[:4]})
        directions.update({image.numpy().tobytes(): sign * torch.ones(5) for image in images[4:]})
        learner.remember(images[4:], labels[4:])
        assert torch.equal(learner.memory.rows[0], images[:4]) != moved
    assert 0.0 in learner.memory.rows[2].round(decimals=4)      # a score of its own


def test_baselines_command_reports_its_own_head_and_our_readouts(baselines):
    argv = ["--method", "er", *TINY, "--buffer", "10", "--out", "er"]
    status, printed, error = cli(baselines, *argv)
    assert status == 0 and "own classifier, AA: Class-IL" in printed, error
    r = json.load(open("er/results.json"))
    assert {"head", "linear", "image_free"} <= r.keys() and len(r["head"]["class_il"]["matrix"]) == 5 and r["method"]["lr"] == 0.1
    assert "prototype" not in r and "neural collapse" not in printed and json.load(open("er/head.json")) == r["head"] and "loss" in json.loads(open("er/log.jsonl").readline())
    diverged = cli(baselines, *argv[:-1], "lost", "--lr", "1000", "--epochs", "3")
    assert diverged[0] == 2 and "smaller --lr than 1000" in diverged[2]
    assert "holds a run already" in cli(baselines, *argv)[2] and "give --buffer" in cli(baselines, "--method", "er", *TINY)[2]


def test_a_gpu_without_a_number_gets_one(monkeypatch):
    """torch.cuda.set_device refuses torch.device("cuda"); no GPU is needed to see what it is given."""
    chosen, real = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, device=None, **k: SimpleNamespace(device=torch.device("cuda:0")) if device == "cuda" else real(*a, device=device, **k))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert train.pick_device("cuda") == torch.device("cuda:0") == chosen[0] and chosen[0].index == 0


# ---------------------------------------------------------------------------- wrong input

BAD = """
train --buffer -1 | --buffer.*'-1'
train --buffer 1.5 | whole number
train --buffer x | 'x'
train --tasks 0 | --tasks
train --tasks 3 | --tasks 3 does not divide the 10 classes
train --tasks 11 | --tasks 11 does not divide
train --tasks -5 | --tasks
train --dim 8 | --dim 8 is too small for 10 prototypes: at least 9
train --dim 0 | --dim
train --dim 9 --prototypes 12 | --dim 9 is too small for 12
train --prototypes 9 | --prototypes 9 are fewer than the 10 classes
train --prototypes 1 | --prototypes
train --tau 0 | --tau
train --tau -0.5 | --tau
train --tau nan | 'nan' should be a number above 0
train --tau inf | 'inf'
train --kappa-past 0 | --kappa-past
train --kappa-current -1 | --kappa-current
train --zeta-past 0 | --zeta-past
train --zeta-current nan | --zeta-current
train --gamma -1 | --gamma
train --gamma nan | --gamma
train --gamma 1e9 | --gamma
train --lr 0 | --lr
train --lr -1 | --lr
train --lr nan | --lr
train --lr inf | --lr
train --lr fast | 'fast'
train --epochs 0 | --epochs
train --epochs 2.5 | --epochs
train --epochs-first 0 | --epochs-first
train --epochs-first -3 | --epochs-first
train --e0 -1 | --e0
train --e0 20 --epochs 20 | --e0 20 of --epochs 20 leaves no epoch
train --batch-size 0 | --batch-size
train --batch-size 1 | '1' should be a whole number from 2
train --alpha-max 1.5 | --alpha-max
train --batch-size -8 | --batch-size
train --width 0 | --width
train --width 4 | --width
train --image-size 3 | --image-size
train --image-size 99999 | --image-size
train --limit-per-class 0 | --limit-per-class
train --val-fraction 1 | --val-fraction
train --val-fraction -0.1 | --val-fraction
train --val-fraction nan | --val-fraction
train --val-fraction 0.0001 | too few for --val-fraction
train --seed -1 | --seed
train --seed 1.5 | --seed
train --plasticity-weight -1 | --plasticity-weight
train --stability-weight nan | --stability-weight
train --device gpu | --device gpu
train --device cuda:99 | --device cuda:99
train --device meta | --device meta
train --dataset mnist | 'mnist'
train --plasticity ce | 'ce'
train --stability kd | 'kd'
train --save-every -1 | --save-every
train --resume --out nowhere | nowhere is not a run
train --resume | is not a run
train --init nowhere | nowhere is not a run
train --init empty | has not finished its first task
train --init done --tasks 1 | --tasks 1, the run has 2
train --init done --resume | give one
train --out done | done holds a run already
train --out a-file | a-file is a file
train --colour red | unrecognized
train --ep 3 | unrecognized
train extra | unrecognized
train --lr | expected one argument
train --dataset folder --data-dir nowhere --tasks 2 | must hold train/<class>/
train --dataset folder --data-dir own | --tasks is needed
train --dataset folder --data-dir own --tasks 5 | does not divide the 12 classes
train --dataset folder --data-dir own --tasks 3 --dim 4 | --dim 4 is too small for 12
train --dataset folder --data-dir one-class --tasks 1 | at least 2
eval nowhere | nowhere is not a run
eval empty | no finished task
eval done --epochs 0 | --epochs
eval done --lr nan | --lr
eval done --probe-samples -1 | --probe-samples
eval buffered --probe-samples 100 | --probe-samples 100 is for runs without a buffer
eval done --split train | 'train'
eval done --split val | without --val-fraction
eval done --device tpu | --device tpu
eval done done | named twice
eval done other | stability is hsd in one and ird in the other: they cannot be averaged
eval | no run under runs/
eval --colour red | unrecognized
""".strip().splitlines()


def test_wrong_input_gets_one_sentence_and_leaves_nothing_behind(here, folder):
    run("done", "--tasks", 2), run("other", "--tasks", 2, "--stability", "ird"), run("buffered", "--tasks", 2, "--buffer", 4)
    Path("empty").mkdir()
    Path("empty/config.json").write_bytes(Path("done/config.json").read_bytes())
    Path("a-file").write_text("")
    for part in ("train", "test"):
        write_image(here / "one-class" / part / "a" / "1.png")
    tree = lambda: {p: p.stat().st_mtime_ns for p in Path().rglob("*") if p.is_file() and not p.name.startswith(".fnc2")}
    before = tree()
    for line in BAD:
        argv, message = line.split(" | ")
        program, *argv = argv.split()
        status, printed, error = cli({"train": train, "eval": evaluation}[program], *argv)
        assert status == 2 and re.search(message, error), (line, status, error)
        assert "Traceback" not in error and len(error.strip().splitlines()) <= 2 and not printed, (line, error)
        assert tree() == before, line


def test_fuzzed_flags_never_end_in_a_traceback(here, monkeypatch):
    monkeypatch.setattr(train, "train", lambda *args: None)
    for name in ("cifar10", "cifar100", "tinyimagenet"):
        monkeypatch.setitem(data.LOADERS, name, lambda root, size: (_ for _ in ()).throw(data.Problem("no data here")))
    values = ["", " ", "nan", "-inf", "inf", "-1", "0", "1", "2", "7", "10", "12", "0.5", "1e-9", "1e400", "9" * 30, "0x10", "None", "true",
              "--", "-", "é", "\u0664", "1,5", "1_0", "auto", "cpu", "hsd", "cifar10", "folder", "../..", "a\nb"]
    flags = sorted(s for action in train.build_parser()._actions for s in action.option_strings if s.startswith("--") and s != "--help")
    dice, statuses = random.Random(0), []
    for _ in range(400):
        argv = [word for flag in dice.sample(flags, dice.randint(1, 3)) for word in ([flag, dice.choice(values)] if dice.random() < 0.9 else [flag])]
        before = set(Path().rglob("*"))
        status, _, error = cli(train, *argv)                    # anything but SystemExit fails here
        statuses.append(status)
        assert status in (0, 2) and (status == 0 or error), argv
        if status == 2:
            assert set(Path().rglob("*")) == before, argv
        for path in set(Path().rglob("config.json")):           # so that the next one is not refused for this
            path.unlink()
    assert 20 < statuses.count(0) < 380


# ---------------------------------------------------------------------------- README

def readme_commands():
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [part.strip() for line in lines for part in line.split("&&") if part.strip().startswith("python ")]


def test_readme_commands_are_valid():
    commands = readme_commands()
    assert "python train.py" in commands and "python eval.py" in commands and "python -m pytest -q" in commands
    assert "python train.py --dataset cifar10 --buffer 0" in commands
    for line in commands:
        program, *argv = shlex.split(line)[1:]
        if program == "eval.py":
            evaluation.build_parser().parse_args(argv)
        elif program == "train.py":
            if "--resume" in argv:
                continue                                        # its settings are the run's
            c = train.parse(argv)
            train.check(c, data.DATASETS[c.dataset]["classes"] or 100)
        else:
            assert program == "-m" or (ROOT / program).is_file()


def test_readme_quick_start_as_a_newcomer_runs_it(here):
    """The printed command in a shell, with the tiny settings appended to it."""
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if "python train.py && python eval.py" in line)
    assert line.startswith("pip install -r requirements.txt && ")
    line = line.split("&& ", 1)[1].replace("python train.py", f"{sys.executable} {ROOT}/train.py {' '.join(TINY)}")
    line = line.replace("python eval.py", f"{sys.executable} {ROOT}/eval.py --epochs 2")
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and "Class-IL" in done.stdout and not done.stderr, done.stderr
    ci = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert ci in (ROOT / "README.md").read_text() and ci.endswith("python -m pytest -q")


@pytest.mark.parametrize("folder", sorted(path.name for path in (ROOT / "results").iterdir() if list(path.glob("*.json"))))
def test_tables_are_the_means_of_the_kept_results(folder):
    """Every row of report.py stands in results/README.md; the README's own table is made of such rows."""
    page, report = (ROOT / "results" / "README.md").read_text(), [sys.executable, ROOT / "results" / "report.py", ROOT / "results" / folder]
    for flags in [[]] + [["--learning"], ["--paper"]] * (folder == "cifar10"):
        done = subprocess.run(report + flags, capture_output=True, text=True)
        tables = done.stdout.split("Nearest prototype:")[0]
        rows = [line for line in tables.splitlines() if re.match(r"\| .* \| \d+ \|", line)]
        assert done.returncode == 0 and len(rows) > 1
        for row in rows:
            assert row in page, f"run results/report.py results/{folder}: {row}"
    done = subprocess.run(report + ["--plot", "hsd:head"], capture_output=True, text=True)
    assert done.returncode == 2 and "no head results of hsd" in done.stderr


def test_readme_results_are_rows_of_the_results_page():
    page = (ROOT / "results" / "README.md").read_text().replace("**", "")
    section = (ROOT / "README.md").read_text().split("## Results")[1].split("\n## ")[0].replace("**", "")
    rows = [line for line in section.splitlines() if re.match(r"\| .* \| \d+ \|", line)]
    assert len(rows) >= 4
    for row in rows:
        assert row in page, row


def test_readme_map_has_the_lines_of_each_file():
    found = dict(re.findall(r"^\| `(\w+\.py)` \| (\d+) \|", (ROOT / "README.md").read_text(), re.M))
    assert {name: int(lines) for name, lines in found.items()} == {
        name: len((ROOT / name).read_text().splitlines()) for name in ("data.py", "etf.py", "model.py", "losses.py", "buffer.py", "train.py", "eval.py")}


def test_readme_snippet_classifies_ones_own_files(here):
    code = next(b for b in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if "mine.png" in b)
    run("runs/shapes-buffer0-seed0", "--epochs", 1)
    assert cli(evaluation, "--epochs", 1)[0] == 0
    write_image(here / "mine.png", size=(40, 30))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert re.fullmatch(r"\['(\w+)'\]\n", printed.getvalue())[1] in data.SHAPES


def test_readme_snippet_prints_what_it_says():
    code = next(b for b in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if "fnc2_loss" in b)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    wanted = re.findall(r"print\(.*?#\s*(.*)", code)
    assert printed.getvalue().split("\n")[:-1] == [w.strip() for w in wanted] and wanted


def test_help_and_errors_are_quick():
    start = time.perf_counter()
    done = subprocess.run([sys.executable, ROOT / "train.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--stability" in done.stdout and time.perf_counter() - start < 20     # 2 s on an idle machine
