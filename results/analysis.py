"""Three analyses of finished runs; they change no run and write nothing.

    python results/analysis.py readout RUN ... [--split val]    # parts of the image-free readout
    python results/analysis.py prototypes RUN                   # do classes reach their prototypes?
    python results/analysis.py focal RUN [--batch-size N]       # what gamma does to FNC2's gradient

readout: AA after the last task, mean over the runs, of eval.py's image-free readout and variants;
the oracle has the true statistics of all classes under the last encoder. prototypes: by task,
neural collapse, nearest prototypes, the part of r_i in FNC2's gradient, S-PRD's targets.
"""

import argparse
import functools
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
from buffer import ReservoirBuffer
from data import augment, normalise, refuse, task_images
from eval import (accuracies, average_accuracy, carry, class_statistics, discriminant, encode,
                  fit_map, linear_readout, more_images)
from losses import fnc2_loss, focal, off_diagonal, positives, similarities
from model import frozen_copy
from train import command, load_data, load_net, open_run, pick_device

EXTRA = ("CutMix", "inverted")                              # of eval.more_images, in its order
ALL = EXTRA + ("turned", "shuffled")                        # of other_images
# Options of read_out. first: leave out the first * width features; stem and stages have 1, 1, 2, 4,
# 8 times the width.
VARIANTS = {
    "**image-free, as in eval.py**": {},
    "last stage": dict(first=8), "last stage, no extra images": dict(first=8, extra=()),
    "stages 2-4": dict(first=2), "stages 2-4, no extra images": dict(first=2, extra=()),
    "no extra images": dict(extra=()),
    **{f"extra images: {', '.join(kinds)}": dict(extra=kinds) for kinds in (
        *((kind,) for kind in ALL), *((*EXTRA, kind) for kind in ALL[2:]), ALL)},
    **{f"ridge {ridge}": dict(ridge=ridge) for ridge in (0.0001, 0.001, 0.01)},
    **{f"shrink {shrink}": dict(shrink=shrink) for shrink in (0.005, 0.01, 0.02, 0.05, 0.1)},
    **{f"covariance: {rank} directions + diagonal": dict(rank=rank) for rank in (32, 64, 128)},
    "without R": dict(residual=False), "not carried": dict(carried=False),
    "scores added to the flipped image's": dict(flip=True),
    **{f"oracle, {name}": dict(oracle=True, first=first) for name, first in (
        ("all stages", 0), ("stages 2-4", 2), ("last stage", 8))},
}


def opened(run, split, device):
    """Settings, data and checkpoints; test (val) images and labels of the classes seen."""
    c, files = open_run(run)
    refuse(not files, f"{run} has no finished task yet")
    refuse(split == "val" and not c.val_fraction, f"{run} was trained without --val-fraction")
    data = load_data(c, device)
    images, y = data[2:4] if split == "test" else data[4:6]
    seen = y <= data.tasks[len(files) - 1][-1]
    plain = lambda x: normalise(x, data.recipe["mean"], data.recipe["std"])
    return c, data, files, images[seen], y[seen], plain


def other_images(images, generator):
    """Each image turned by 90, 180 or 270 degrees; each image with 4 x 4 patches shuffled."""
    n, side = len(images), images.shape[-1] // 4
    turn = torch.randint(3, (n,), generator=generator)
    turned = torch.stack([images.rot90(k, (2, 3)) for k in (1, 2, 3)])[turn, torch.arange(n)]
    patches = images.unfold(2, side, side).unfold(3, side, side).flatten(2, 3)  # (n, 3, 16, s, s)
    order = torch.rand(n, 1, 16, 1, 1, generator=generator).argsort(2).to(images.device)
    patches = patches.gather(2, order.expand_as(patches)).unflatten(2, (4, 4))
    shuffled = patches.transpose(3, 4).flatten(4, 5).flatten(2, 3)              # (n, 3, 4s, 4s)
    return torch.cat([turned, F.interpolate(shuffled, images.shape[2:])])


def encode_run(run, split, device):
    """All features that the variants need, encoded once, and the scores of the linear readouts."""
    c, data, files, images, y, plain = opened(run, split, device)
    joined = lambda net, x: encode(net.joined, x, plain).cpu()
    buffer, tasks, before, after = ReservoirBuffer(200, seed=c.seed), [], [None], []
    for t, file in enumerate(files, 1):
        old_net, (net, state) = None if t == 1 else net, load_net(file, c, device)
        held = state["buffer"] if c.buffer else buffer.state_dict()
        task, g = task_images(data, t), torch.Generator().manual_seed(c.seed)
        more, kinds = (task[0], ["task"]) if t == 1 else (
            torch.cat([more_images(task[0], g), other_images(task[0], g)]), ["task", *ALL])
        for found, encoder in ((before, old_net), (after, net.eval())):
            if encoder is not None:
                found.append(dict(zip(kinds, joined(encoder, more).chunk(len(kinds)))))
        tasks.append(task)
        buffer.add(*task)
        print(f"{run}: encoded task {t} of {len(files)}", file=sys.stderr, flush=True)

    @functools.lru_cache(maxsize=None)
    def drift(t, start, extra, ridge):
        """The map from the features of encoder t-1, from `start` on, to those of encoder t."""
        return fit_map(*(torch.cat([h[t][kind][:, start:] for kind in ("task", *extra)]).double()
                         for h in (before, after)), ridge)

    test, linear, scored = joined(net, images), {}, data.tasks[:len(files)]
    crop = lambda x: augment(x, g, **data.recipe | {"blur": 0}, jitter=0, grey=0)
    for layer in (net.features, net.joined):
        weight, bias = (part.cpu() for part in linear_readout(
            layer, crop, task, (held["images"], held["labels"]), scored[-1][-1] + 1, epochs=100,
            lr=0.1, seed=c.seed))
        linear[f"linear, {len(held['labels'])} old images, {layer.__name__}"] = F.linear(
            test[:, -weight.shape[1]:], weight, bias)
    return argparse.Namespace(
        width=c.width, drift=drift, own=[h["task"] for h in after], test=test, tasks=scored,
        flipped=joined(net, images.flip(3)), last=torch.cat([joined(net, x) for x, _ in tasks]),
        labels=[labels.cpu() for _, labels in tasks], y=y.cpu(), linear=linear)


def read_out(r, *, first=0, extra=EXTRA, ridge=fit_map.__defaults__[0], residual=True, carried=True,
             rank=None, shrink=discriminant.__defaults__[0], flip=False, oracle=False):
    """Scores of the test images by a variant of the image-free readout; r: of encode_run."""
    start, stats = first * r.width, None
    for t, (h, labels) in enumerate(zip(r.own, r.labels)):
        means, S = class_statistics(h[:, start:].double(), labels)
        if t:
            W, b, R = r.drift(t, start, extra, ridge)
            if not carried:
                W, b, R = torch.eye(len(W), dtype=W.dtype), 0 * b, 0 * R
            means, S = carry(*stats, W, b, R if residual else 0 * R, means, S)
        if rank:                                            # of what is kept from task to task
            values, vectors = torch.linalg.eigh(S)                                  # ascending
            leading = vectors[:, -rank:] * values[-rank:] @ vectors[:, -rank:].T
            S = leading + (S - leading).diagonal().diag()
        stats = means, S
    if oracle:
        stats = class_statistics(r.last[:, start:].double(), torch.cat(r.labels))
    classifier = [part.float() for part in discriminant(*stats, shrink)]
    scores = F.linear(r.test[:, start:], *classifier)
    return scores + F.linear(r.flipped[:, start:], *classifier) if flip else scores


def readout(runs, split, device):
    """Print the table of all variants, and of the linear classifier with old images."""
    found = {}
    for run in runs:
        r = encode_run(run, split, device)
        scores = {name: read_out(r, **options) for name, options in VARIANTS.items()} | r.linear
        for name, s in scores.items():
            found.setdefault(name, []).append(
                [average_accuracy([row]) for row in accuracies(s, r.y, r.tasks)])
    print(f"| {split} images, n = {len(runs)} | Class-IL / Task-IL AA |\n|---|---|")
    for name, pairs in found.items():
        print(f"| {name} | " + " / ".join(f"{statistics.mean(v):.1f}" for v in zip(*pairs)) + " |")


def collapse_by_task(z, labels, prototypes, tasks):
    """NC1-NC4 as eval.neural_collapse, over all classes seen, averaged over those of each task."""
    K = tasks[-1][-1] + 1
    mu = torch.stack([z[labels == k].mean(0) for k in range(K)])                # (K, d)
    centred, p = (F.normalize(v - v.mean(0), dim=1) for v in (mu, prototypes[:K]))
    angles = (centred @ centred.T + 1 / (K - 1)).abs().fill_diagonal_(0).sum(1) / (K - 1)
    agree = ((z @ prototypes[:K].T).argmax(1) == torch.cdist(z, mu).argmin(1)).float()
    within = (z - mu[labels]).square().sum(1)
    nc1, nc4 = (torch.stack([v[labels == k].mean() for k in range(K)]) for v in (within, agree))
    measures = torch.stack([nc1, angles, (centred - p).norm(dim=1), 100 * nc4])     # (4, K)
    return [measures[:, classes].mean(1).tolist() for classes in tasks]


def part_of_r(z, labels, prototypes, old, *, tau, gamma):
    """The part of FNC2's gradient, by norm, in %, that is the pull of views to their prototypes."""
    def own_term(z):                            # what losses.fnc2_loss has of r_i
        others = torch.cat([off_diagonal(similarities(z, z, tau)), similarities(z, old, tau)], 1)
        log_r = (z * prototypes[labels]).sum(1) / tau - others.logsumexp(1)
        log_r = log_r.clamp(max=0) if gamma else log_r
        return -(focal(log_r, gamma) / (positives(labels).sum(1) + 1)).mean()

    whole = gradient(lambda z: fnc2_loss(z, labels, prototypes, old, tau=tau, gamma=gamma), z)
    own = gradient(own_term, z)
    return (100 * own.norm() / (own.norm() + (whole - own).norm())).item()


def gradient(loss, z):
    """Of a loss with respect to unit z, along the sphere: what normalisation lets through."""
    return torch.func.grad(lambda v: loss(F.normalize(v, dim=1)))(z).flatten()


def batches(data, t, size, count=8):
    """Views of random batches of task t, of its own images, as in training: x (2N, 3, S, S) and labels (2N,)."""
    (images, labels), g = task_images(data, t), torch.Generator().manual_seed(t)
    for batch in torch.randperm(len(labels), generator=g).to(labels.device).split(size)[:count]:
        yield augment(images[batch].repeat(2, 1, 1, 1), g, **data.recipe), labels[batch].repeat(2)


@torch.no_grad()
def prototypes(run, split, device):
    """Print a row for each task of a run of FNC2: the last encoder, gradients, S-PRD's targets."""
    c, data, files, images, labels, plain = opened(run, split, device)
    refuse(c.plasticity != "fnc2", f"{run} was trained by {c.plasticity}, without prototypes")
    nets, states = zip(*(load_net(file, c, device) for file in (None, *files)))
    p, tasks = states[-1]["prototypes"], data.tasks[:len(files)]
    z = encode(nets[-1].eval(), images, plain)
    measured = zip(collapse_by_task(z, labels, p, tasks),
                   *accuracies(z @ p[:tasks[-1][-1] + 1].T, labels, tasks))
    print("| task | NC1 | NC2 | NC3 | NC4, % | nearest prototype, Class-IL | Task-IL | r_i in the "
          "gradient, start of the task, % | end | S-PRD's targets for its images: old prototypes, "
          "% | their own | images whose largest target is old, % |\n" + "|---" * 12 + "|")
    for t, (nc, *accuracy) in enumerate(measured, 1):
        old, seen = tasks[t - 1][0], tasks[t - 1][-1] + 1
        replay, targets = p[:old if c.pseudo_replay else 0], []
        teacher, student = map(frozen_copy, nets[t - 1:t + 1])
        parts = [statistics.mean(part_of_r(net(x), y, p, replay, tau=c.tau, gamma=c.gamma)
                                 for x, y in batches(data, t, c.batch_size))
                 for net in (teacher, student)]
        for x, y in batches(data, t, c.batch_size) if t > 1 else ():
            q = 100 * similarities(teacher(x), p[:seen], c.zeta_past).softmax(1)    # (2N, seen)
            targets.append([q[:, :old].sum(1).mean(), q.gather(1, y[:, None]).mean(),
                            100 * (q.argmax(1) < old).float().mean()])
        cells = [f"{v:.2f}" for v in (*nc, *accuracy, *parts)]
        cells += [f"{sum(v) / len(v):.2f}" for v in zip(*targets)] or ["-"] * 3
        print(f"| {t} | " + " | ".join(cells) + " |", flush=True)


@torch.no_grad()
def focal_factor(run, size, device):
    """Print cosine and length of FNC2's gradients for gamma 1 and 4, beside gamma 0."""
    c, data, files, *_ = opened(run, "test", device)
    for t, file in enumerate(files, 1):
        x, y = next(batches(data, t, size or c.batch_size))
        net, state = load_net(file, c, device)
        p, z = state["prototypes"], frozen_copy(net)(x)
        old = p[:data.tasks[t - 1][0] if c.pseudo_replay else 0]
        plain, *others = (gradient(lambda z: fnc2_loss(
            z, y, p, old, tau=c.tau, gamma=gamma), z) for gamma in (0, 1, 4))
        print(f"after task {t}, {len(x)} views: " + "; ".join(
            f"gamma {gamma}: cosine with gamma 0 {F.cosine_similarity(plain, other, dim=0):.5f}, "
            f"length {100 * (other.norm() / plain.norm() - 1):+.1f} %"
            for gamma, other in zip((1, 4), others)))


def main(argv):
    parser = argparse.ArgumentParser(prog="analysis.py", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["readout", "prototypes", "focal"])
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--split", choices=["test", "val"], default="test")
    parser.add_argument("--batch-size", type=int, help="of focal (the run's)")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    if args.what == "readout":
        return readout(args.runs, args.split, device)
    for run in args.runs:
        print(f"\n{run}\n")
        if args.what == "prototypes":
            prototypes(run, args.split, device)
        else:
            focal_factor(run, args.batch_size, device)


if __name__ == "__main__":
    command(main)
