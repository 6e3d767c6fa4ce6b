"""Stage 2, the evaluation of a run of train.py, after every task t:

  1. Freeze the encoder of task<t>.pt and extract the features of the training images at hand, once per
     view: the images D_t of task t, and the old images of the buffer that task t was trained with. With
     buffer 0 the classifier alone gets --probe-samples old images (the encoder never saw them again).
  2. Train a linear classifier on these features for --epochs, every class drawn equally often; last epoch.
  3. A[t, i] = accuracy on the test images of each task i <= t. Class-IL: over all classes seen so far.
     Task-IL: over the classes of task i only, by the same classifier.
Beside it, a readout that needs no image and no training: the nearest prototype, argmax_k z.p_k.

    python eval.py                                  # the newest run under runs/
    python eval.py runs/a runs/b runs/c             # a line each, then mean +- std over the runs
    python eval.py runs/a --plot figures            # heat-map, accuracy over tasks, embeddings (needs matplotlib)
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from buffer import ReservoirBuffer
from data import Problem, augment, load, normalise, read, save, write
from model import Encoder

VIEWS = 4           # random crops per training image whose features are cached


# ---------------------------------------------------------------------------- metrics

def average_accuracy(A):
    """AA (Eq. 11): mean over the tasks i of A[T, i]. A (T, T): row t = after task t, column i = task i."""
    return sum(float(a) for a in A[-1]) / len(A[-1])


def forgetting(A):
    """F (Eq. 12): mean over i < T of the best A[t, i] before the last task (i <= t < T) minus A[T, i].

    Negative when old tasks got better; nan for a single task, where nothing could be forgotten.
    """
    T = len(A)
    if T == 1:
        return math.nan
    return sum(max(float(A[t][i]) for t in range(i, T - 1)) - float(A[T - 1][i]) for i in range(T - 1)) / (T - 1)


def accuracies(scores, labels, tasks):
    """Scores (n, seen classes) of the test images of `tasks` -> Class-IL and Task-IL percentages, a list each."""
    class_il, task_il = [], []
    for classes in tasks:
        mine = (labels >= classes[0]) & (labels <= classes[-1])
        s, y = scores[mine], labels[mine]
        class_il.append(100 * (s.argmax(1) == y).float().mean().item())
        inside = s[:, classes[0]:classes[-1] + 1].argmax(1) + classes[0]
        task_il.append(100 * (inside == y).float().mean().item())
    return class_il, task_il


def neural_collapse(z, labels, prototypes):
    """NC1-NC4 of section 2.3 for embeddings z (n, d) of classes 0..K-1, with w_k = p_k. All are 0 (NC4: 100) at collapse.

    nc1: mean trace of the within-class covariance; nc2: mean |cos(mu_i, mu_j) + 1/(K-1)| of the centred class means;
    nc3: mean distance of a centred unit mean to its prototype; nc4: % where nearest prototype = nearest class mean.
    """
    K = int(labels.max()) + 1
    p = prototypes[:K]
    mu = torch.stack([z[labels == k].mean(0) for k in range(K)])                # (K, d)
    nc1 = torch.stack([(z[labels == k] - mu[k]).square().sum(1).mean() for k in range(K)]).mean()
    centred = F.normalize(mu - mu.mean(0), dim=1)
    pairs = ~torch.eye(K, dtype=torch.bool, device=z.device)
    nc2 = ((centred @ centred.T)[pairs] + 1 / (K - 1)).abs().mean()
    nc3 = (centred - F.normalize(p, dim=1)).norm(dim=1).mean()
    nc4 = 100 * ((z @ p.T).argmax(1) == torch.cdist(z, mu).argmin(1)).float().mean()
    return {"nc1": nc1.item(), "nc2": nc2.item(), "nc3": nc3.item(), "nc4": nc4.item()}


# ---------------------------------------------------------------------------- readouts

@torch.no_grad()
def encode(net, images, view, batch=500):
    """Features (n, F) and embeddings (n, d) of uint8 images; `view` turns a batch of them into the input."""
    was_training, parts = net.training, []
    net.eval()
    for part in images.split(batch):
        h = net.features(view(part))
        parts.append((h, net.project(h)))
    net.train(was_training)
    return tuple(torch.cat(part) for part in zip(*parts))


def linear_probe(features, labels, num_classes, *, epochs, lr, seed, batch=256):
    """Train a linear classifier on cached features (V, n, F), V views of n images: weight (C, F) and bias (C,).

    An epoch draws n samples: a class at random, one of its images, one of that image's views. SGD with momentum 0.9,
    cosine to 0. Features are standardised while training, and that is folded into the weights returned.
    """
    g, device = torch.Generator().manual_seed(seed), features.device
    mean, std = features.mean((0, 1)), features.std((0, 1)).clamp(min=1e-6)     # (F,)
    x = (features - mean) / std
    V, n = x.shape[:2]
    order = labels.argsort(stable=True).cpu()                                   # images grouped by class
    count = torch.bincount(labels.cpu(), minlength=num_classes)
    present = count.nonzero().squeeze(1)                                        # with no old image a class is absent
    start = count.cumsum(0) - count
    weight = torch.zeros(num_classes, x.shape[2], device=device, requires_grad=True)
    bias = torch.zeros(num_classes, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], lr=lr, momentum=0.9)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * epoch / epochs)) / 2
        k = present[torch.randint(len(present), (n,), generator=g)]
        index = order[start[k] + (torch.rand(n, generator=g) * count[k]).long()].to(device)
        view = torch.randint(V, (n,), generator=g).to(device)
        for i, v in zip(index.split(batch), view.split(batch)):
            loss = F.cross_entropy(F.linear(x[v, i], weight, bias), labels[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weight = weight.detach() / std
    return weight, bias.detach() - weight @ mean


# ---------------------------------------------------------------------------- runs

def open_run(path, device="cpu"):
    """Settings and task checkpoints of a run: a namespace and the list of task<t>.pt that are there, in order."""
    path = Path(path)
    if not (path / "config.json").is_file():
        raise Problem(f"{path} is not a run: it has no config.json")
    try:
        config = json.loads((path / "config.json").read_text())["settings"]
    except (ValueError, KeyError, TypeError):
        raise Problem(f"{path / 'config.json'} is damaged or not of this program") from None
    files = []
    while (path / f"task{len(files) + 1}.pt").is_file():
        files.append(path / f"task{len(files) + 1}.pt")
    return SimpleNamespace(**config), files


def load_data(c, device, data_dir=None):
    """The data of a run with settings `c`, on the device."""
    data = load(c.dataset, data_dir or c.data_dir, tasks=c.tasks, image_size=c.image_size,
                limit_per_class=c.limit_per_class, val_fraction=c.val_fraction, seed=c.seed)
    views = dict(data.views, mean=torch.tensor(data.views["mean"], device=device),
                 std=torch.tensor(data.views["std"], device=device))
    return data._replace(views=views, **{name: value.to(device) for name, value in data._asdict().items()
                                         if isinstance(value, torch.Tensor)})


def evaluate(run, *, epochs, lr, probe_samples, split, device, data_dir=None):
    """Evaluate one run: the dictionary that results.json holds, and the last embeddings for the plots."""
    c, files = open_run(run)
    if not files:
        raise Problem(f"{run} has no finished task yet: there is nothing to evaluate")
    if split == "val" and not c.val_fraction:
        raise Problem(f"{run} was trained without --val-fraction: it has no validation images, use --split test")
    data = load_data(c, device, data_dir)
    images, labels = (data.val_images, data.val_labels) if split == "val" else (data.test_images, data.test_labels)
    mean, std = data.views["mean"], data.views["std"]
    g = torch.Generator().manual_seed(c.seed)                       # crops of the training features
    probe = ReservoirBuffer(probe_samples, seed=c.seed)             # old images, for buffer 0 only
    rows = {name: {"class_il": [], "task_il": []} for name in ("linear", "prototype")}
    coverage, classifier = [], {}
    for t, file in enumerate(files):
        state = read(file, device)
        net = Encoder(c.width, c.dim).to(device, memory_format=torch.channels_last)
        net.load_state_dict(state["net"])
        tasks, prototypes = data.tasks[:t + 1], state["prototypes"]
        seen = tasks[-1][-1] + 1

        current = (data.train_labels >= tasks[-1][0]) & (data.train_labels < seen)
        task_images, task_labels = data.train_images[current], data.train_labels[current]
        old_images, old_labels = (state["buffer"]["images"], state["buffer"]["labels"]) if c.buffer else (probe.images, probe.labels)
        coverage.append([len(old_labels.unique()), tasks[-1][0]])
        train_images = torch.cat([task_images, old_images.to(device)])
        train_labels = torch.cat([task_labels, old_labels.to(device)])
        crops = lambda x: augment(x, g, **data.views | {"blur": 0}, jitter=0, grey=0)
        features = torch.stack([encode(net, train_images, crops)[0] for _ in range(VIEWS)])     # (V, n, F)
        weight, bias = linear_probe(features, train_labels, seen, epochs=epochs, lr=lr, seed=c.seed)
        classifier[f"task{t + 1}"] = {"weight": weight, "bias": bias}

        shown = labels < seen
        h, z = encode(net, images[shown], lambda x: normalise(x, mean, std))
        y = labels[shown]
        for name, scores in (("linear", F.linear(h, weight, bias)), ("prototype", z @ prototypes[:seen].T)):
            for kind, row in zip(("class_il", "task_il"), accuracies(scores, y, tasks)):
                rows[name][kind].append(row)
        probe.add(task_images, task_labels)
    save(Path(run) / "classifier.pt", classifier)

    results = {name: {kind: summary(matrix) for kind, matrix in kinds.items()} for name, kinds in rows.items()}
    results |= {"nc": neural_collapse(z, y, prototypes), "old_classes_covered": coverage,
                "tasks_finished": len(files), "split": split, "epochs": epochs, "lr": lr,
                "probe_samples": None if c.buffer else probe_samples, "views": VIEWS, "settings": vars(c)}
    return results, (z.cpu(), y.cpu(), prototypes[:seen].cpu())


def summary(matrix):
    """Rows of 1, 2, ..., T accuracies -> the square matrix with null above the diagonal, AA and forgetting."""
    F_ = forgetting(matrix)
    return {"matrix": [row + [None] * (len(matrix) - len(row)) for row in matrix],
            "aa": average_accuracy(matrix), "forgetting": None if math.isnan(F_) else F_}


# ---------------------------------------------------------------------------- output

READOUTS = {"linear": "linear classifier", "prototype": "nearest prototype"}


def show(value):
    return "   -" if value is None else f"{value:.1f}"


def print_results(run, r):
    """The four matrices of a run, side by side for Class-IL and Task-IL, and its summary lines."""
    c = r["settings"]
    print(f"\n{run}: {c['dataset']}, {c['plasticity']} + {c['stability']}, buffer {c['buffer']}, seed {c['seed']}, "
          f"{r['tasks_finished']} of {c['tasks']} tasks, {r['split']} images")
    T = r["tasks_finished"]
    for name, title in READOUTS.items():
        print(f"\n{title + ', %':<24}{'Class-IL':<{6 * T + 4}}Task-IL")
        head = "".join(f"{f'T{i + 1}':>6}" for i in range(T))
        print(f"{'':18}{head}    {head}")
        for t in range(T):
            left, right = ("".join(f"{show(a):>6}" for a in r[name][kind]["matrix"][t]) for kind in ("class_il", "task_il"))
            print(f"  after task {t + 1:<5}{left}    {right}")
        for key in ("aa", "forgetting"):
            print(f"  {key.replace('aa', 'AA'):<16}{show(r[name]['class_il'][key]):>6}{'':{6 * T - 2}}{show(r[name]['task_il'][key]):>6}")
    n = r["nc"]
    covered, old = r["old_classes_covered"][-1]
    print(f"\nneural collapse  NC1 {n['nc1']:.3f}  NC2 {n['nc2']:.3f}  NC3 {n['nc3']:.3f}  NC4 {n['nc4']:.1f} %")
    print(f"the classifier had images of {covered} of {old} old classes after the last task")


def print_table(all_results):
    """A line for each run, then mean +- sample standard deviation over the runs."""
    columns = [(name, kind, key) for name in READOUTS for kind in ("class_il", "task_il") for key in ("aa", "forgetting")]
    print(f"\n{'':32}" + "".join(f"{READOUTS[name]:<32}" for name in READOUTS))
    print(f"{'':32}" + f"{'Class-IL':<16}{'Task-IL':<16}" * 2)
    print(f"{'run':<32}" + f"{'AA':<8}{'forget.':<8}" * 4)
    for run, r in all_results.items():
        print(f"{str(run)[-30:]:<32}" + "".join(f"{show(r[a][b][k]):<8}" for a, b, k in columns))
    values = [[r[a][b][k] for r in all_results.values()] for a, b, k in columns]
    cells = ["-" if None in v else f"{statistics.mean(v):.1f}+-{statistics.stdev(v):.1f}" for v in values]
    print(f"{f'mean +- std, n = {len(all_results)}':<32}" + "".join(f"{cell:<8} "[:max(8, len(cell) + 1)] for cell in cells))


def tsne(x, perplexity=30, steps=500, seed=0):
    """Exact t-SNE (van der Maaten & Hinton 2008) of x (n, d) to (n, 2), for the embedding picture."""
    n = len(x)
    d2 = torch.cdist(x, x).square()
    beta, low, high = torch.ones(n, 1), torch.zeros(n, 1), torch.full((n, 1), math.inf)
    for _ in range(50):                             # bisect each point's bandwidth to the wanted perplexity
        p = (-beta * d2).fill_diagonal_(-math.inf).softmax(1)
        wide = torch.special.entr(p).sum(1, keepdim=True) > math.log(perplexity)
        low, high = torch.where(wide, beta, low), torch.where(wide, high, beta)
        beta = torch.where(high.isinf(), 2 * beta, (low + high) / 2)
    p = (p + p.T) / (2 * n)
    y = 1e-2 * torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    velocity = torch.zeros_like(y)
    for step in range(steps):
        q = (1 / (1 + torch.cdist(y, y).square())).fill_diagonal_(0)
        force = (p * (12 if step < 100 else 1) - q / q.sum()) * q               # early exaggeration
        gradient = 4 * (force.sum(1, keepdim=True) * y - force @ y)
        velocity = (0.5 if step < 100 else 0.8) * velocity - n / 12 * gradient
        y = y + velocity
    return y - y.mean(0)


def plot(folder, all_results, embeddings):
    """Write accuracy.png (heat-maps), tasks.png (AA over tasks) and embeddings.png, a panel or a line for each run."""
    try:
        import matplotlib
    except ImportError:
        raise Problem("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    runs = list(all_results)
    titles = [f"{s['plasticity']} + {s['stability']}, buffer {s['buffer']}, seed {s['seed']}"
              for s in (all_results[run]["settings"] for run in runs)]

    figure, axes = plt.subplots(len(runs), 2, figsize=(8, 3.6 * len(runs)), squeeze=False, layout="constrained")
    for run, title, pair in zip(runs, titles, axes):
        for kind, axis in zip(("class_il", "task_il"), pair):
            matrix = all_results[run]["linear"][kind]["matrix"]
            T = len(matrix)
            picture = axis.imshow([[math.nan if a is None else a for a in row] for row in matrix], vmin=0, vmax=100)
            for t in range(T):
                for i in range(t + 1):
                    axis.text(i, t, f"{matrix[t][i]:.0f}", ha="center", va="center",
                              color="black" if matrix[t][i] > 60 else "white", fontsize=9 if T < 8 else 6)
            axis.set(title=f"{kind.replace('class_il', 'Class-IL').replace('task_il', 'Task-IL')}: {title}", xlabel="accuracy on task",
                     ylabel="after task", xticks=range(T), yticks=range(T),
                     xticklabels=range(1, T + 1), yticklabels=range(1, T + 1))
            axis.title.set_fontsize(9)
        figure.colorbar(picture, ax=list(pair), label="%")
    figure.savefig(folder / "accuracy.png", dpi=120)

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for kind, axis in zip(("class_il", "task_il"), axes):
        for number, (run, title) in enumerate(zip(runs, titles)):
            for name, line in (("linear", "-"), ("prototype", ":")):
                rows = [[a for a in row if a is not None] for row in all_results[run][name][kind]["matrix"]]
                axis.plot(range(1, len(rows) + 1), [sum(row) / len(row) for row in rows], line, marker="o",
                          color=f"C{number}", label=f"{title}, {READOUTS[name]}")
        axis.set(title=kind.replace("class_il", "Class-IL").replace("task_il", "Task-IL"), xlabel="after task",
                 ylabel="average accuracy, %", ylim=(0, 102), xticks=range(1, len(rows) + 1))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7, loc="lower left")
    figure.savefig(folder / "tasks.png", dpi=120)

    figure, axes = plt.subplots(1, len(runs), figsize=(5 * len(runs), 5), squeeze=False, layout="constrained")
    for run, title, axis in zip(runs, titles, axes[0]):
        z, y, prototypes = embeddings[run]
        some = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))[:1500]
        flat = tsne(torch.cat([z[some], prototypes]))
        colours = plt.get_cmap("tab10" if len(prototypes) <= 10 else "nipy_spectral", len(prototypes))
        axis.scatter(*flat[:len(some)].T, s=6, c=[colours(k) for k in y[some].tolist()], linewidths=0)
        for k, point in enumerate(flat[len(some):].tolist()):
            axis.scatter(*point, marker="*", s=160, color=colours(k), edgecolors="black",
                         label=f"class {k}" if len(prototypes) <= 10 else None)
        axis.set(title=title, xticks=[], yticks=[])
        axis.title.set_fontsize(9)
    axes[0, 0].legend(fontsize=7, title="stars: prototypes", title_fontsize=7, markerscale=0.5)
    figure.suptitle("test embeddings after the last task, t-SNE", fontsize=10)
    figure.savefig(folder / "embeddings.png", dpi=120)
    plt.close("all")


# ---------------------------------------------------------------------------- command line

def number(kind, low, high=math.inf, above=False):
    """An argparse type: a number of `kind` with low <= value <= high (low < value if `above`)."""
    def parse(text):
        word = "a whole number" if kind is int else "a number"
        limits = f"{'above' if above else 'from'} {low}" + ("" if high == math.inf else f" to {high}")
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high) or (above and value == low) or value in (math.inf, -math.inf):
            raise argparse.ArgumentTypeError(f"{text!r} should be {word} {limits}")
        return value
    return parse


def pick_device(name):
    """--device to a torch.device; auto takes CUDA, then MPS, then the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise Problem(f"--device {name} is not to be had here: auto, cpu, or a cuda or mps device that torch sees") from None
    return device


def command(main):
    """Run a program's main(argv): a Problem becomes one sentence and exit status 2, whatever argparse itself does."""
    try:
        sys.exit(main(sys.argv[1:]))
    except Problem as problem:
        print(f"{Path(sys.argv[0]).name}: error: {problem}", file=sys.stderr)
        sys.exit(2)


def main(argv):
    parser = argparse.ArgumentParser(prog="eval.py", allow_abbrev=False, usage="python eval.py [RUN ...] [flags]",
                                     description="Linear and nearest-prototype evaluation of runs of train.py.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders; none: the newest under runs/")
    parser.add_argument("--epochs", type=number(int, 1, 10**6), default=100, help="of the linear classifier (100)")
    parser.add_argument("--lr", type=number(float, 0, 1000, above=True), default=0.1, help="of the linear classifier (0.1)")
    parser.add_argument("--probe-samples", type=number(int, 0, 10**7), default=200,
                        help="old images that the classifier gets when the run has no buffer (200)")
    parser.add_argument("--split", choices=["test", "val"], default="test", help="val: the part held out by --val-fraction")
    parser.add_argument("--plot", metavar="DIR", help="write accuracy.png, tasks.png and embeddings.png there")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    parser.add_argument("--data-dir", metavar="DIR", help="where the data is now, if not where the run found it")
    args = parser.parse_args(argv)

    runs = [Path(run) for run in args.runs]
    if not runs:
        found = sorted(Path("runs").glob("*/config.json"), key=lambda p: p.stat().st_mtime)
        if not found:
            raise Problem("there is no run under runs/: train one with python train.py, or name its folder")
        runs = [found[-1].parent]
    if len(set(runs)) < len(runs):
        raise Problem(f"the run {max(runs, key=runs.count)} is named twice")
    device, settings = pick_device(args.device), {}
    for run in runs:                                    # all are looked at before any is evaluated
        c, files = open_run(run)
        settings[run] = (vars(c) | {"tasks_finished": len(files)})
        for key, value in settings[runs[0]].items():
            if key not in ("seed", "device", "compile", "out", "init", "data_dir", "save_every", "amp") \
                    and settings[run].get(key) != value and not args.plot:
                raise Problem(f"{runs[0]} and {run} cannot be averaged: {key} is {value} in one and {settings[run].get(key)} in the other")
    all_results, embeddings = {}, {}
    for run in runs:
        results, embeddings[run] = evaluate(run, epochs=args.epochs, lr=args.lr, probe_samples=args.probe_samples,
                                            split=args.split, device=device, data_dir=args.data_dir)
        all_results[run] = results
        path = run / ("results.json" if args.split == "test" else "results-val.json")
        write(path, json.dumps(results, indent=1).encode())
        print_results(run, results)
        print(f"written to {path}")
    if len(runs) > 1:
        print_table(all_results)
    if args.plot:
        plot(args.plot, all_results, embeddings)
        print(f"pictures in {args.plot}: accuracy.png, tasks.png, embeddings.png")


if __name__ == "__main__":
    command(main)
