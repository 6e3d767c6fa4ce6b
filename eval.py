"""Stage 2: evaluate a run of train.py. After every task t, three readouts of the frozen encoder:

  linear      The paper's: a linear classifier trained on features of the images of task t and the
              old ones in the buffer that task t trained with, every class drawn equally often; the
              last epoch counts. With buffer 0 the classifier alone gets --probe-samples old images:
              the encoder never saw them.
  image-free  Ours: no old image at all. A mean for each class and one covariance for all, carried
              along when the encoder moves; linear discriminant analysis.
  prototype   The nearest prototype, argmax_k z.p_k: nothing is kept, nothing trained.

A[t, i] = accuracy on the test images of task i <= t. Class-IL: among all classes seen so far;
Task-IL: among the classes of task i, by the same scores.

    python eval.py                            # the newest run under runs/
    python eval.py runs/a runs/b runs/c       # a line each, then mean ± std over the runs
"""

import argparse
import json
import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F

from buffer import ReservoirBuffer
from data import DATASETS, Problem, augment, normalise, of_classes, save, split_tasks, write
from train import FREE, command, load_data, load_task, make_task, number, open_run, pick_device

# Random crops (and flips) of each image whose features are cached. Classes are drawn equally often,
# so the few old images are drawn far more often than the task's, and need more crops not to be
# memorised.
CROPS, OLD_CROPS = 4, 32
READOUTS = {"linear": "linear classifier", "image_free": "image-free",
            "prototype": "nearest prototype"}
KINDS = {"class_il": "Class-IL", "task_il": "Task-IL"}


# ------------------------------------------------------------------------ metrics

def average_accuracy(A):
    """AA (Eq. 11): mean over i of A[T, i]. A (T, T): row t = after task t, column i = task i."""
    return sum(float(a) for a in A[-1]) / len(A[-1])


def forgetting(A):
    """F (Eq. 12): mean over i < T of max A[t, i] over i <= t < T, minus A[T, i]. (The paper's max
    begins at t = 1, where task i > 1 has no accuracy yet.)

    Negative where old tasks got better; nan for a single task, which has nothing to forget.
    """
    T = len(A)
    if T == 1:
        return math.nan
    best = [max(float(A[t][i]) for t in range(i, T - 1)) for i in range(T - 1)]
    return sum(best[i] - float(A[-1][i]) for i in range(T - 1)) / (T - 1)


def accuracies(scores, labels, tasks):
    """Scores (n, classes seen) of images of `tasks` -> Class-IL and Task-IL %, lists by task."""
    class_il, task_il = [], []
    for classes in tasks:
        mine = of_classes(labels, classes)
        s, y = scores[mine], labels[mine]
        inside = s[:, classes[0]:classes[-1] + 1].argmax(1) + classes[0]
        class_il.append(100 * (s.argmax(1) == y).float().mean().item())
        task_il.append(100 * (inside == y).float().mean().item())
    return class_il, task_il


def neural_collapse(z, labels, prototypes):
    """NC1-NC4 (section 2.3) of embeddings z (n, d) of classes 0..K-1, with the prototypes as w_k.

    nc1: mean trace of the within-class covariances; nc2: mean |cos(mu_i, mu_j) + 1/(K-1)| of the
    centred class means; nc3: mean distance of a centred unit mean to its prototype, centred alike;
    nc4: % of images whose nearest prototype is that of their nearest class mean. Collapse: 0, 0, 0
    and 100. A single class has no angles: None.
    """
    K = int(labels.max()) + 1
    p = prototypes[:K]
    if K == 1:
        return {"nc1": None, "nc2": None, "nc3": None, "nc4": None}
    mu = torch.stack([z[labels == k].mean(0) for k in range(K)])                # (K, d)
    nc1 = sum((z[labels == k] - mu[k]).square().sum(1).mean() for k in range(K)) / K
    centred = F.normalize(mu - mu.mean(0), dim=1)
    pairs = ~torch.eye(K, dtype=torch.bool, device=z.device)
    nc2 = ((centred @ centred.T)[pairs] + 1 / (K - 1)).abs().mean()
    nc3 = (centred - F.normalize(p - p.mean(0), dim=1)).norm(dim=1).mean()
    nc4 = 100 * ((z @ p.T).argmax(1) == torch.cdist(z, mu).argmin(1)).float().mean()
    return {"nc1": nc1.item(), "nc2": nc2.item(), "nc3": nc3.item(), "nc4": nc4.item()}


# ------------------------------------------------------------------------ readouts

@torch.no_grad()
def encode(net, images, view, batch=500):
    """Features (n, F) and embeddings (n, d) of uint8 images; `view` makes a batch into an input."""
    was_training, parts = net.training, []
    net.eval()
    for part in images.split(batch):
        h = net.features(view(part))
        parts.append((h, net.project(h)))
    net.train(was_training)
    return tuple(torch.cat(part) for part in zip(*parts))


def linear_probe(features, labels, num_classes, *, draws, epochs, lr, seed, batch=256):
    """A linear classifier on cached features (m, F) of crops with labels (m,): (C, F) and (C,).

    An epoch is that many draws of a class, then of one of its crops. SGD with momentum 0.9, cosine
    to 0. Features are standardised, which is folded into the weights returned.
    """
    g, device = torch.Generator().manual_seed(seed), features.device
    mean, std = features.mean(0), features.std(0).clamp(min=1e-6)               # (F,)
    x = (features - mean) / std
    order = labels.argsort(stable=True).cpu()                                   # crops by class
    count = torch.bincount(labels.cpu(), minlength=num_classes)
    start, present = count.cumsum(0) - count, count.nonzero().squeeze(1)        # some may be absent
    weight = torch.zeros(num_classes, x.shape[1], device=device, requires_grad=True)
    bias = torch.zeros(num_classes, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], lr=lr, momentum=0.9)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * epoch / epochs)) / 2
        k = present[torch.randint(len(present), (draws,), generator=g)]
        index = order[start[k] + (torch.rand(draws, generator=g) * count[k]).long()].to(device)
        for i in index.split(batch):
            loss = F.cross_entropy(F.linear(x[i], weight, bias), labels[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weight = weight.detach() / std
    return weight, bias.detach() - weight @ mean


def linear_readout(net, crop, task, old, num_classes, **how):
    """The linear classifier of `task` and `old`, each (images, labels): features cached, once."""
    parts = [task] * CROPS + [old] * (OLD_CROPS if len(old[1]) else 0)
    features = torch.cat([encode(net, images, crop)[0] for images, _ in parts])
    labels = torch.cat([labels.to(features.device) for _, labels in parts])
    return linear_probe(features, labels, num_classes, draws=len(task[1]) + len(old[1]), **how)


# The image-free readout. A class is a Gaussian: a mean mu_k, and one covariance S for all classes.
# After task t the encoders of tasks t-1 and t are both at hand, and so are the images of task t: an
# affine map fitted on these, from old features to new ones, carries mu_k and S of the old classes
# along. The idea of a learnt map: Gomez-Villa et al., ECCV 2024 (arXiv 2407.08536), for means.

def class_statistics(features, labels):
    """(n, F), (n,) -> means (K, F) of the K classes in order, and their mean covariance (F, F)."""
    parts = [features[labels == k] for k in labels.unique()]
    means = torch.stack([part.mean(0) for part in parts])
    covariance = sum((part - mu).T @ (part - mu) / len(part) for part, mu in zip(parts, means))
    return means, covariance / len(parts)


def damped(matrix, amount):
    """A covariance plus `amount` of its mean variance on the diagonal: it can be inverted."""
    extra = amount * matrix.diagonal().mean() + torch.finfo(matrix.dtype).eps
    return matrix + extra * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def fit_map(old, new, ridge=1e-3):
    """old W + b ~ new by least squares: (n, F), (n, F) -> W (F, F), b (F,), and R (F, F), the
    covariance of what the map leaves over."""
    x, y = old - old.mean(0), new - new.mean(0)
    W = torch.linalg.solve(damped(x.T @ x / len(x), ridge), x.T @ y / len(x))
    rest = y - x @ W
    return W, new.mean(0) - old.mean(0) @ W, rest.T @ rest / len(rest)


def carry(means, covariance, W, b, R):
    """The statistics of old classes as the new encoder would give them: mu W + b, W^T S W + R."""
    return means @ W + b, W.T @ covariance @ W + R


def join(means, covariance, new_means, new_covariance):
    """Statistics of old and new classes together; S is the mean over classes."""
    k, m = len(means), len(new_means)
    return (torch.cat([means, new_means]), (k * covariance + m * new_covariance) / (k + m))


def discriminant(means, covariance, shrink=0.05):
    """Scores h S^-1 mu_k - mu_k S^-1 mu_k / 2 as a linear classifier: weight (K, F), bias (K,)."""
    weight = torch.linalg.solve(damped(covariance, shrink), means.T).T
    return weight, -(weight * means).sum(1) / 2


# ------------------------------------------------------------------------ runs

def compare(runs):
    """Refuse to average runs that differ in more than the seed."""
    first = None
    for run in runs:
        c, finished = open_run(run)
        mine = {key: value for key, value in vars(c).items() if key not in FREE | {"seed"}}
        mine["finished tasks"] = len(finished)
        first = first or mine
        for key in first:
            if mine[key] != first[key]:
                raise Problem(f"{runs[0]} and {run} differ: {key} is {first[key]} in one and "
                              f"{mine[key]} in the other: they cannot be averaged")


def evaluate(run, *, epochs=100, lr=0.1, probe_samples=None, split="test", device="cpu",
             data_dir=None):
    """Evaluate one run; writes its classifier.pt and returns what results.json holds."""
    c, finished = open_run(run)
    if not finished:
        raise Problem(f"{run} has no finished task yet: there is nothing to evaluate")
    if split == "val" and not c.val_fraction:
        raise Problem(f"{run} was trained without --val-fraction: it has no validation images")
    if c.buffer and probe_samples is not None:
        raise Problem(f"--probe-samples {probe_samples} is for runs without a buffer; the "
                      f"classifier of {run} gets its buffer of {c.buffer}")
    data = load_data(c, device, data_dir)
    images, labels = ((data.test_images, data.test_labels) if split == "test" else
                      (data.val_images, data.val_labels))
    colours = {key: data.recipe[key] for key in ("mean", "std")}
    g = torch.Generator().manual_seed(c.seed)
    crop = lambda x: augment(x, g, **data.recipe | {"blur": 0}, jitter=0, grey=0)
    plain = lambda x: normalise(x, **colours)
    exact = lambda net, x: encode(net, x, plain)[0].cpu().double()      # for the image-free readout
    probe = ReservoirBuffer(200 if probe_samples is None else probe_samples, seed=c.seed)
    rows = {name: {kind: [] for kind in KINDS} for name in READOUTS}
    saved = {"classes": data.names} | {key: value.tolist() for key, value in colours.items()}
    last_net = kept = None                      # kept: means and covariance, image-free
    for t, file in enumerate(finished, 1):
        state, net = load_task(file, c, device)
        task = make_task(data, t, probe, state["prototypes"])

        held = state["buffer"] if c.buffer else probe.state_dict()
        linear = linear_readout(net, crop, (task.images, task.labels),
                                (held["images"], held["labels"]), task.seen, epochs=epochs, lr=lr,
                                seed=c.seed)
        h_task = exact(net, task.images)        # (n, F)
        new = class_statistics(h_task, task.labels.cpu())
        if t > 1:                               # the old encoder, on images of this task alone
            kept = carry(*kept, *fit_map(exact(last_net, task.images), h_task))
        kept = join(*kept, *new) if t > 1 else new
        image_free = [part.float().to(device) for part in discriminant(*kept)]

        shown = labels < task.seen
        h, z = encode(net, images[shown], plain)
        scores = {"linear": F.linear(h, *linear), "image_free": F.linear(h, *image_free),
                  "prototype": z @ task.prototypes[:task.seen].T}
        tasks = data.tasks[:t]
        if c.tasks == 1:                        # joint training, scored by the dataset's own tasks
            tasks = split_tasks(task.seen, DATASETS[c.dataset]["tasks"] or 1)
        for name in READOUTS:
            for kind, row in zip(KINDS, accuracies(scores[name], labels[shown], tasks)):
                rows[name][kind].append(row)
        saved[f"task{t}"] = {
            "linear": dict(zip(("weight", "bias"), linear)),
            "image_free": dict(zip(("weight", "bias", "means", "covariance"),
                                   (*image_free, *(part.float() for part in kept))))}
        probe.add(task.images, task.labels)
        last_net = net
    save(Path(run) / "classifier.pt", saved)
    results = {name: {kind: summary(rows[name][kind]) for kind in KINDS} for name in READOUTS}
    nc, wide, old = neural_collapse(z, labels[shown], task.prototypes), h.shape[1], task.old
    if c.plasticity != "fnc2":                  # no prototypes were learned with
        nc |= {"nc3": None, "nc4": None}
    return results | {
        "nc": nc, "tasks_finished": len(finished), "split": split, "epochs": epochs, "lr": lr,
        "old_images": len(held["labels"]), "old_classes": old,
        "old_classes_covered": len(held["labels"].unique()), "crops": [CROPS, OLD_CROPS],
        "kept_bytes": {"linear": held["images"].numel(), "prototype": 0,
                       "image_free": 4 * wide * (old + wide) if old else 0},
        "settings": vars(c)}


def summary(rows):
    """Rows of 1, 2, ..., T accuracies -> square matrix, null above the diagonal; AA; forgetting."""
    lost = forgetting(rows)
    return {"matrix": [row + [None] * (len(rows) - len(row)) for row in rows],
            "aa": average_accuracy(rows), "forgetting": None if math.isnan(lost) else lost}


# ------------------------------------------------------------------------ output

def show(value):
    return "-" if value is None else f"{value:.1f}"


def print_results(run, r):
    """The matrices of a run, Class-IL beside Task-IL, and its summary lines."""
    c = r["settings"]
    print(f"\n{run}: {c['dataset']}, {c['plasticity']} + {c['stability']}, buffer {c['buffer']}, "
          f"seed {c['seed']}, {r['tasks_finished']} of {c['tasks']} tasks, {r['split']} images")
    for name in ("linear", "image_free"):
        matrices = [r[name][kind]["matrix"] for kind in KINDS]
        columns = len(matrices[0][0])
        width = max(6 * columns, 10) + 2
        print(f"\n{READOUTS[name] + ', %':<22}{KINDS['class_il']:<{width}}{KINDS['task_il']}")
        names = "".join(f"{f'T{i + 1}':>6}" for i in range(columns))
        print(f"{'':16}{names:<{width}}{names}")
        for t, pair in enumerate(zip(*matrices)):
            left, right = ("".join(f"{show(a):>6}" for a in row) for row in pair)
            print(f"  after task {t + 1:<3}{left:<{width}}{right}")
        for key in ("aa", "forgetting"):
            left, right = (f"{show(r[name][kind][key]):>6}" for kind in KINDS)
            print(f"  {'AA' if key == 'aa' else key:<14}{left:<{width}}{right}")
    kept, old, size = r["kept_bytes"], r["old_classes"], 8 * c["width"]
    print(f"\nkept of old tasks: linear {r['old_images']} images of {r['old_classes_covered']} of "
          f"{old} old classes ({kept['linear']} bytes);\n  image-free {old} vectors of {size} and "
          f"one {size} x {size} matrix ({kept['image_free']} bytes)")
    if c["plasticity"] == "fnc2":
        print("nearest prototype (keeps nothing), AA: " + ", ".join(
            f"{KINDS[kind]} {r['prototype'][kind]['aa']:.1f}" for kind in KINDS))
    if r["nc"]["nc1"] is not None:
        print(f"neural collapse: NC1 {r['nc']['nc1']:.3f}, NC2 {r['nc']['nc2']:.3f}" + (
            f"; with the prototypes as w_k: NC3 {r['nc']['nc3']:.3f}, NC4 {r['nc']['nc4']:.1f} %"
            if r["nc"]["nc3"] is not None else ""))


def print_table(all_results):
    """A line for each run, then mean ± sample standard deviation."""
    rows = {run: [r[name][kind][key] for name in ("linear", "image_free") for kind in KINDS
                  for key in ("aa", "forgetting")] for run, r in all_results.items()}
    print(f"\n{'':26}" + "".join(f"{READOUTS[name]:<44}" for name in ("linear", "image_free")))
    print(f"{'':26}" + "".join(f"{title:<22}" for title in KINDS.values()) * 2)
    print(f"{'run':<26}" + f"{'AA':<11}{'forgetting':<11}" * 4)
    for run, row in rows.items():
        print(f"{str(run)[-25:]:<26}" + "".join(f"{show(value):<11}" for value in row))
    cells = ["-" if None in v else f"{statistics.mean(v):.1f} ± {statistics.stdev(v):.1f}"
             for v in zip(*rows.values())]
    print(f"{f'mean ± std, n = {len(all_results)}':<26}" + "".join(f"{a:<11}" for a in cells))


# ------------------------------------------------------------------------ command line

def build_parser():
    """The flags; every one has a default."""
    parser = argparse.ArgumentParser(
        prog="eval.py", allow_abbrev=False, usage="python eval.py [RUN ...] [flags]",
        description="Linear, image-free and nearest-prototype evaluation of runs of train.py.")
    flag = parser.add_argument
    flag("runs", nargs="*", metavar="RUN", help="run folders; none: the newest under runs/")
    flag("--epochs", type=number(int, 1, 10**6), default=100, help="of the classifier (100)")
    flag("--lr", type=number(float, 0, 1000, above=True), default=0.1, help="its rate (0.1)")
    flag("--probe-samples", type=number(int, 0, 10**7),
         help="old images for the classifier of a run without buffer (200)")
    flag("--split", choices=["test", "val"], default="test", help="val: what --val-fraction kept")
    flag("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (auto)")
    flag("--data-dir", metavar="DIR", help="where the data is, if not where the run found it")
    return parser


def main(argv):
    """Evaluate the runs named, or the newest; print, and write results.json."""
    options = vars(build_parser().parse_args(argv))         # the keywords of `evaluate`, and runs
    runs = [Path(run) for run in options.pop("runs")]
    options["device"] = pick_device(options["device"])
    if not runs:
        newest = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
        if not newest:
            raise Problem("there is no run under runs/: python train.py makes one, or name one")
        runs = [newest[-1].parent]
    if len(set(runs)) < len(runs):
        raise Problem(f"the run {max(runs, key=runs.count)} is named twice")
    compare(runs)
    all_results = {}
    for run in runs:
        results = all_results[run] = evaluate(run, **options)
        path = run / ("results.json" if options["split"] == "test" else "results-val.json")
        write(path, json.dumps(results, indent=1).encode())
        print_results(run, results)
        print(f"written to {path}")
    if len(runs) > 1:
        print_table(all_results)
    print(f"draw them: python results/plot.py {' '.join(map(str, runs))} --out figures")


if __name__ == "__main__":
    command(main)
