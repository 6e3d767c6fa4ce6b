"""Stage 2: evaluate a run of train.py. After every task t, three readouts of the frozen encoder:

  linear      The paper's: a linear classifier, trained on the images of task t and the old images
              in its buffer, every class drawn equally often; the last epoch counts. With buffer 0
              the classifier alone gets --probe-samples old images, which no encoder sees again.
  image-free  Ours: no old image. The mean of each class and one covariance, corrected for the drift
              of the encoder after every task; linear discriminant analysis.
  prototype   The nearest prototype, argmax_k z.p_k: nothing is kept, nothing trained.

A[t, i] = accuracy on the test images of task i <= t. Class-IL: among all classes seen so far;
Task-IL: among the classes of task i, by the same scores.

    python eval.py                            # the run under runs/ that was written to last
    python eval.py runs/a runs/b runs/c       # a line each; mean ± std of runs that differ in seed
"""

import argparse
import json
import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F

from buffer import ReservoirBuffer
from data import (DATASETS, augment, crop_boxes, normalise, refuse, save, split_tasks, task_images,
                  write)
from train import FREE, at_least, command, load_data, load_net, open_run, pick_device

CROPS, OLD_CROPS = 4, 32        # cached crops of each image; the few old ones are drawn more often
READOUTS = ("linear", "image_free", "prototype")
KINDS = {"class_il": "Class-IL", "task_il": "Task-IL"}


def average_accuracy(A):
    """AA (Eq. 11): mean over i of A[T, i]. A (T, T): row t = after task t, column i = task i."""
    return sum(float(a) for a in A[-1]) / len(A[-1])


def forgetting(A):
    """F (Eq. 12): mean over i < T of max A[t, i] over i <= t < T, minus A[T, i]; nan for T = 1.

    The paper's max begins at t = 1, where task i > 1 has no accuracy yet. It can be negative.
    """
    T = len(A)
    lost = [max(float(A[t][i]) for t in range(i, T - 1)) - float(A[-1][i]) for i in range(T - 1)]
    return sum(lost) / len(lost) if lost else math.nan


def accuracies(scores, labels, tasks):
    """Scores (n, classes seen) of images of `tasks` -> Class-IL and Task-IL %, lists by task."""
    class_il, task_il = [], []
    for classes in tasks:
        of_task = (labels >= classes[0]) & (labels <= classes[-1])
        s, y = scores[of_task], labels[of_task]
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
        return dict.fromkeys(("nc1", "nc2", "nc3", "nc4"))
    mu = torch.stack([z[labels == k].mean(0) for k in range(K)])                # (K, d)
    nc1 = sum((z[labels == k] - mu[k]).square().sum(1).mean() for k in range(K)) / K
    centred = F.normalize(mu - mu.mean(0), dim=1)
    pairs = ~torch.eye(K, dtype=torch.bool, device=z.device)
    nc2 = ((centred @ centred.T)[pairs] + 1 / (K - 1)).abs().mean()
    nc3 = (centred - F.normalize(p - p.mean(0), dim=1)).norm(dim=1).mean()
    nc4 = 100 * ((z @ p.T).argmax(1) == torch.cdist(z, mu).argmin(1)).float().mean()
    return {"nc1": nc1.item(), "nc2": nc2.item(), "nc3": nc3.item(), "nc4": nc4.item()}


@torch.no_grad()
def encode(layer, images, view, batch=500):
    """layer(view(images)), a batch at a time: `layer` is a method of a network in eval mode."""
    return torch.cat([layer(view(part)) for part in images.split(batch)])


def linear_probe(features, labels, num_classes, *, draws, epochs, lr, seed, batch=256):
    """A linear classifier on cached features (m, F) of crops with labels (m,): (C, F) and (C,).

    An epoch is `draws` draws of a class, then of one of its crops. SGD with momentum 0.9, cosine
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


def linear_readout(features, crop, task, old, num_classes, **how):
    """The classifier of `task` and `old`, each (images, labels): features of crops, made once."""
    parts = [task] * CROPS + [old] * (OLD_CROPS if len(old[1]) else 0)
    x = torch.cat([encode(features, images, crop) for images, _ in parts])
    labels = torch.cat([labels.to(x.device) for _, labels in parts])
    return linear_probe(x, labels, num_classes, draws=len(task[1]) + len(old[1]), **how)


# ------------------------------------------------------------------------ image-free readout
# A class is a Gaussian: a mean mu_k, and one covariance S for all classes. After task t we have the
# encoders of tasks t-1 and t and the images of task t: an affine map between their features, old to
# new, carries mu_k and S of the old classes along (means: Gomez-Villa et al., ECCV 2024; covariances,
# by a learned map: Rypeść et al., NeurIPS 2024).
# Features are `joined`: all stages, because early ones move less and the last one collapses.

def more_images(images, generator):
    """The images, as many mixed by CutMix and as many inverted: (n, 3, S, S) -> (3n, 3, S, S).

    Training collapses a task's own images to few points (neural collapse), which do not show how
    features of other images moved.
    """
    n, size = len(images), images.shape[-1]
    u = torch.rand(n, 23, generator=generator).to(images.device)
    top, left, height, width = (v[:, None] for v in crop_boxes(u[:, :22], size, (0.2, 0.8)))
    pixel = torch.arange(size, device=images.device)
    rows, columns = ((pixel >= start) & (pixel < start + length)                    # (n, S)
                     for start, length in ((top, height), (left, width)))
    box = rows[:, None, :, None] & columns[:, None, None, :]                        # (n, 1, S, S)
    mixed = torch.where(box, images[u[:, 22].argsort()], images)
    return torch.cat([images, mixed, 255 - images])


def class_statistics(h, labels):
    """(n, F), (n,) -> means (K, F) of the K classes in order, and their mean covariance (F, F)."""
    parts = [h[labels == k] for k in labels.unique()]
    means = torch.stack([part.mean(0) for part in parts])
    covariance = sum((part - mu).T @ (part - mu) / len(part) for part, mu in zip(parts, means))
    return means, covariance / len(parts)


def damped(matrix, amount):
    """A covariance plus `amount` of its mean variance on the diagonal: it can be inverted."""
    extra = amount * matrix.diagonal().mean() + torch.finfo(matrix.dtype).eps
    return matrix + extra * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def fit_map(old, new, ridge=1e-3):
    """old W + b ~ new by least squares, (n, F) each; R (F, F): covariance of the residuals."""
    x, y = old - old.mean(0), new - new.mean(0)
    W = torch.linalg.solve(damped(x.T @ x / len(x), ridge), x.T @ y / len(x))
    rest = y - x @ W
    return W, new.mean(0) - old.mean(0) @ W, rest.T @ rest / len(rest)


def carry(means, S, W, b, R, new_means, new_S):
    """Old classes under the new encoder, mu W + b and W^T S W + R, joined by the new classes."""
    k, m = len(means), len(new_means)
    S = (k * (W.T @ S @ W + R) + m * new_S) / (k + m)                   # the mean over classes
    return torch.cat([means @ W + b, new_means]), S


def discriminant(means, covariance, shrink=0.01):
    """Scores h S^-1 mu_k - mu_k S^-1 mu_k / 2 as a linear classifier: weight (K, F), bias (K,)."""
    weight = torch.linalg.solve(damped(covariance, shrink), means.T).T
    return weight, -(weight * means).sum(1) / 2


def evaluate(run, *, epochs=100, lr=0.1, probe_samples=None, split="test", device="cpu",
             data_dir=None):
    """Evaluate one run; writes its classifier.pt and returns what results.json holds."""
    c, files = open_run(run)
    c.data_dir = data_dir or c.data_dir
    refuse(not files, f"{run} has no finished task yet: there is nothing to evaluate")
    refuse(split == "val" and not c.val_fraction, f"{run} was trained without --val-fraction")
    refuse(c.buffer and probe_samples is not None, f"--probe-samples {probe_samples} is for buffer "
           f"0; the classifier of {run} gets its buffer of {c.buffer} images")
    data, device = load_data(c, device), torch.device(device)
    images, labels = ((data.test_images, data.test_labels) if split == "test" else
                      (data.val_images, data.val_labels))
    g = torch.Generator().manual_seed(c.seed)
    crop = lambda x: augment(x, g, **data.recipe | {"blur": 0}, jitter=0, grey=0)
    plain = lambda x: normalise(x, data.recipe["mean"], data.recipe["std"])
    exact = lambda net, x: encode(net.joined, x, plain).cpu().double()
    probe = ReservoirBuffer(200 if probe_samples is None else probe_samples, seed=c.seed)
    rows = {name: {kind: [] for kind in KINDS} for name in READOUTS}
    last_net = stats = None                     # stats: means and covariance of old classes
    for t, file in enumerate(files, 1):
        net, state = load_net(file, c, device)
        net.eval()
        task, seen = task_images(data, t), data.tasks[t - 1][-1] + 1
        held = state["buffer"] if c.buffer else probe.state_dict()
        old = held["images"], held["labels"]
        how = dict(epochs=epochs, lr=lr, seed=c.seed)
        linear = linear_readout(net.features, crop, task, old, seen, **how)
        more = more_images(task[0], torch.Generator().manual_seed(c.seed)) if t > 1 else task[0]
        h = exact(net, more)
        new = class_statistics(h[:len(task[1])], task[1].cpu())
        stats = carry(*stats, *fit_map(exact(last_net, more), h), *new) if t > 1 else new
        image_free = [part.float().to(device) for part in discriminant(*stats)]

        shown = labels < seen
        h, z = (encode(layer, images[shown], plain) for layer in (net.joined, net))
        scores = {"linear": F.linear(h[:, -8 * c.width:], *linear),     # these are `features`
                  "image_free": F.linear(h, *image_free),
                  "prototype": z @ state["prototypes"][:seen].T}
        tasks = data.tasks[:t]
        if c.tasks == 1:                        # joint training, scored by the dataset's own tasks
            tasks = split_tasks(seen, DATASETS[c.dataset]["tasks"] or 1)
        for name in READOUTS:
            for kind, row in zip(KINDS, accuracies(scores[name], labels[shown], tasks)):
                rows[name][kind].append(row)
        print(f"{run}: evaluated after task {t} of {len(files)}", flush=True)
        probe.add(*task)
        last_net = net
    save(Path(run) / "classifier.pt", {                     # after the last task: weight, bias
        "linear": linear, "image_free": image_free, "statistics": stats, "classes": data.names})
    results = {name: {kind: summary(rows[name][kind]) for kind in KINDS} for name in READOUTS}
    nc = neural_collapse(z, labels[shown], state["prototypes"])
    if c.plasticity != "fnc2":                  # the prototypes were not used
        nc |= {"nc3": None, "nc4": None}
    return results | {
        "nc": nc, "tasks_finished": len(files), "split": split, "epochs": epochs, "lr": lr,
        "old_images": len(held["labels"]), "old_classes_covered": len(held["labels"].unique()),
        "crops": [CROPS, OLD_CROPS], "settings": vars(c)}


def summary(rows):
    """Rows of 1, 2, ..., T accuracies -> square matrix, null above the diagonal; AA; forgetting."""
    lost = forgetting(rows)
    return {"matrix": [row + [None] * (len(rows) - len(row)) for row in rows],
            "aa": average_accuracy(rows), "forgetting": None if math.isnan(lost) else lost}


def print_summary(all_results):
    """AA and forgetting of each run and readout, then mean ± std of runs that differ in seed."""
    print("\nAverage accuracy (AA) over all tasks after the last one, and forgetting, in %\n"
          f"{'':50}{'Class-IL: all classes seen':<30}Task-IL: classes of the task\n"
          f"{'run':<26}{'readout':<24}" + f"{'AA':<15}{'forgetting':<15}" * 2)
    rows, groups = [(str(run)[-25:], [r]) for run, r in all_results.items()], {}
    for r in all_results.values():
        differ = FREE | {"seed", "init", "recipe"}          # init names the seed's own task 1
        same = {key: v for key, v in r["settings"].items() if key not in differ}
        groups.setdefault((str(same), r["tasks_finished"]), []).append(r)
    rows += [(f"mean ± std, n = {len(group)}", group) for group in groups.values() if group[1:]]
    for title, group in rows:
        labels = [f"linear, {group[0]['old_images']} old images", "image-free", "nearest prototype"]
        if group[0]["settings"]["plasticity"] != "fnc2":
            labels.pop()                        # trained without prototypes
        for name, label in zip(READOUTS, labels):
            print(f"{title:<26}{label:<24}" + "".join(
                f"{show([r[name][kind][key] for r in group]):<15}"
                for kind in KINDS for key in ("aa", "forgetting")))


def show(values):
    """One value as 58.4, several as 58.4 ± 1.2, none as -."""
    spread = f" ± {statistics.stdev(values):.1f}" if values[1:] and None not in values else ""
    return "-" if None in values else f"{statistics.mean(values):.1f}{spread}"


def print_matrices(r):
    """The accuracies of one run, task by task, and the measures of neural collapse."""
    for kind, title in KINDS.items():
        matrix = r["linear"][kind]["matrix"]
        print(f"\n{title} accuracy of the linear readout, %: a row after each task, a column for "
              "the images of each task\n" + " " * 14
              + "".join(f"{f'task {i + 1}':>8}" for i in range(len(matrix[0]))))
        for t, row in enumerate(matrix):
            print(f"after task {t + 1:<3}" + "".join(f"{show([a]):>8}" for a in row))
    print("\nNeural collapse, complete at 0, 0, 0 and 100: " + ", ".join(
        f"{key.upper()} {value:.2f}" for key, value in r["nc"].items() if value is not None))


def build_parser():
    """The flags; every one has a default."""
    parser = argparse.ArgumentParser(
        prog="eval.py", allow_abbrev=False, usage="python eval.py [RUN ...] [flags]",
        description="Linear, image-free and nearest-prototype evaluation of runs of train.py.")
    flag = parser.add_argument
    flag("runs", nargs="*", metavar="RUN", help="run folders (the last one written to, in runs/)")
    flag("--epochs", type=int, default=100, help="of the classifier (100)")
    flag("--lr", type=float, default=0.1, help="its rate (0.1)")
    flag("--probe-samples", type=int, help="old images for the classifier with buffer 0 (200)")
    flag("--split", choices=["test", "val"], default="test", help="val: --val-fraction's (test)")
    flag("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (auto)")
    flag("--data-dir", metavar="DIR", help="where the data is, if it was moved")
    return parser


def main(argv):
    """Evaluate the runs; print, and write results.json (results-val.json)."""
    args = build_parser().parse_args(argv)
    at_least(args, epochs=1, lr=1e-6, probe_samples=0)
    logs = sorted(Path("runs").glob("*/log.jsonl"), key=lambda path: path.stat().st_mtime)
    refuse(not args.runs + logs, "there is no run under runs/: name one, or make one with train.py")
    runs = [Path(run) for run in args.runs] or [logs[-1].parent]
    refuse(len(set(runs)) < len(runs), f"the run {max(runs, key=runs.count)} is named twice")
    options = vars(args) | {"device": pick_device(args.device)}
    del options["runs"]
    name, all_results = "results.json" if args.split == "test" else "results-val.json", {}
    for run in runs:
        all_results[run] = evaluate(run, **options)
        write(run / name, json.dumps(all_results[run], indent=1).encode())
    print_summary(all_results)
    if len(runs) == 1:
        print_matrices(all_results[runs[0]])
    pictures = f"; pictures: python results/plot.py {' '.join(map(str, runs))}"
    print(f"written: {name}" + pictures * (args.split == "test"))


if __name__ == "__main__":
    command(main)
