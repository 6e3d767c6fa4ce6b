"""Stage 2: evaluate a run of train.py. After every task t:

  1. Freeze the encoder of task<t>.pt and extract, once per view, the features of the training
     images at hand: those of task t and the old ones in the buffer that task t trained with. With
     buffer 0 the classifier alone gets --probe-samples old images: the encoder never saw them.
  2. Train a linear classifier on them, every class drawn equally often; the last epoch counts.
  3. A[t, i] = accuracy on the test images of task i <= t. Class-IL: among all classes seen so far.
     Task-IL: among the classes of task i, by the same classifier.
Beside it, a readout that needs neither images nor training: the nearest prototype, argmax_k z.p_k.

    python eval.py                            # the newest run under runs/
    python eval.py runs/a runs/b runs/c       # a line each, then mean +- std over the runs
    python eval.py runs/a --plot figures      # heat-map, accuracy over tasks, embeddings
"""

import argparse
import contextlib
import json
import math
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from buffer import ReservoirBuffer
from data import DATASETS, Problem, augment, load, normalise, of_classes, read, save, write
from model import Encoder

# Random crops of each image whose features are cached. Classes are drawn equally often, so the few
# old images are drawn far more often than the task's, and need more views not to be memorised.
VIEWS, OLD_VIEWS = 4, 32
READOUTS = {"linear": "linear classifier", "prototype": "nearest prototype"}
KINDS = {"class_il": "Class-IL", "task_il": "Task-IL"}
SAME_RESULT = {"device", "compile", "out", "resume", "init", "data_dir", "save_every", "profile"}
SETTINGS = {"dataset", "data_dir", "buffer", "tasks", "seed", "image_size", "limit_per_class",
            "val_fraction", "classes", "plasticity", "stability", "width", "dim"}  # needed here


# ------------------------------------------------------------------------ metrics

def average_accuracy(A):
    """AA (Eq. 11): mean over i of A[T, i]. A (T, T): row t = after task t, column i = task i."""
    return sum(float(a) for a in A[-1]) / len(A[-1])


def forgetting(A):
    """F (Eq. 12): mean over i < T of max A[t, i] over i <= t < T, minus A[T, i].

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
    """A linear classifier on cached features (m, F) of views with labels (m,): (C, F) and (C,).

    An epoch is that many draws of a class, then of one of its views. SGD with momentum 0.9, cosine
    to 0. Features are standardised, which is folded into the weights returned.
    """
    g, device = torch.Generator().manual_seed(seed), features.device
    mean, std = features.mean(0), features.std(0).clamp(min=1e-6)               # (F,)
    x = (features - mean) / std
    order = labels.argsort(stable=True).cpu()                                   # views by class
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


# ------------------------------------------------------------------------ runs

def open_run(path):
    """A run's settings, as a namespace, and its finished tasks, task1.pt, task2.pt, ..."""
    path, finished = Path(path), []
    if not (path / "config.json").is_file():
        raise Problem(f"{path} is not a run: it has no config.json")
    try:
        saved = json.loads((path / "config.json").read_text())["settings"]
        if saved["dataset"] not in DATASETS or not SETTINGS <= saved.keys():
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Problem(f"{path / 'config.json'} is damaged, or not of this program") from None
    while (path / f"task{len(finished) + 1}.pt").is_file():
        finished.append(path / f"task{len(finished) + 1}.pt")
    return SimpleNamespace(**saved), finished


def compare(runs):
    """How runs that should be averaged differ, in words; None if in nothing but the seed."""
    first = None
    for run in runs:
        c, finished = open_run(run)
        mine = {key: value for key, value in vars(c).items() if key not in SAME_RESULT | {"seed"}}
        mine["finished tasks"] = len(finished)
        first = first or mine
        for key in first:
            if mine.get(key) != first[key]:
                return (f"{runs[0]} and {run} differ: {key} is {first[key]} in one and "
                        f"{mine.get(key)} in the other")


def load_data(c, device, data_dir=None):
    """The data of a run with settings `c`, all of it on the device."""
    data = load(c.dataset, data_dir or c.data_dir, tasks=c.tasks, image_size=c.image_size,
                limit_per_class=c.limit_per_class, val_fraction=c.val_fraction, seed=c.seed)
    if c.classes not in (None, data.names):
        raise Problem(f"{data_dir or c.data_dir} has other classes than the run was trained on")
    moved = {name: value.to(device) for name, value in data._asdict().items()
             if isinstance(value, torch.Tensor)}
    colours = {name: torch.tensor(data.views[name], device=device) for name in ("mean", "std")}
    return data._replace(**moved, views=data.views | colours)


def load_task(file, c, device):
    """What a task<t>.pt holds, and the network in it."""
    state, net = read(file, device, keys=("net", "prototypes", "buffer")), Encoder(c.width, c.dim)
    try:
        net.load_state_dict(state["net"])
    except (RuntimeError, TypeError, AttributeError):
        raise Problem(f"{file} is not of this run: its network is not of width {c.width} and "
                      f"dim {c.dim}") from None
    return state, net.to(device, memory_format=torch.channels_last)


def evaluate(run, *, epochs, lr, probe_samples, split, device, data_dir=None):
    """One run: what results.json holds, and the last embeddings, labels and prototypes to draw."""
    c, finished = open_run(run)
    if not finished:
        raise Problem(f"{run} has no finished task yet: there is nothing to evaluate")
    if split == "val" and not c.val_fraction:
        raise Problem(f"{run} was trained without --val-fraction: it has no validation images")
    data = load_data(c, device, data_dir)
    images, labels = data.test_images, data.test_labels
    if split == "val":
        images, labels = data.val_images, data.val_labels
    g = torch.Generator().manual_seed(c.seed)
    crop = lambda x: augment(x, g, **data.views | {"blur": 0}, jitter=0, grey=0)
    plain = lambda x: normalise(x, data.views["mean"], data.views["std"])
    probe = ReservoirBuffer(probe_samples, seed=c.seed)             # used with buffer 0 only
    rows = {name: {kind: [] for kind in KINDS} for name in READOUTS}
    covered, classifier = [], {}
    for t, file in enumerate(finished):
        state, net = load_task(file, c, device)
        tasks, prototypes = data.tasks[:t + 1], state["prototypes"]
        first, seen = tasks[-1][0], tasks[-1][-1] + 1
        mine = of_classes(data.train_labels, tasks[-1])
        task_images, task_labels = data.train_images[mine], data.train_labels[mine]
        if c.buffer:
            old_images, old_labels = state["buffer"]["images"], state["buffer"]["labels"]
        else:
            old_images, old_labels = probe.images, probe.labels
        covered.append([len(old_labels.unique()), first])
        views = [(task_images, task_labels)] * VIEWS
        views += [(old_images, old_labels)] * (OLD_VIEWS if len(old_labels) else 0)
        features = torch.cat([encode(net, x, crop)[0] for x, _ in views])
        weight, bias = linear_probe(
            features, torch.cat([y.to(device) for _, y in views]), seen, epochs=epochs, lr=lr,
            draws=len(task_labels) + len(old_labels), seed=c.seed)
        classifier[f"task{t + 1}"] = {"weight": weight, "bias": bias}
        shown = labels < seen
        h, z = encode(net, images[shown], plain)
        scores = {"linear": F.linear(h, weight, bias), "prototype": z @ prototypes[:seen].T}
        for name in READOUTS:
            for kind, row in zip(KINDS, accuracies(scores[name], labels[shown], tasks)):
                rows[name][kind].append(row)
        probe.add(task_images, task_labels)
    save(Path(run) / "classifier.pt", classifier)
    results = {name: {kind: summary(rows[name][kind]) for kind in KINDS} for name in READOUTS}
    results |= {"nc": neural_collapse(z, labels[shown], prototypes), "old_classes_covered": covered,
                "tasks_finished": len(finished), "split": split, "epochs": epochs, "lr": lr,
                "probe_samples": None if c.buffer else probe_samples, "views": [VIEWS, OLD_VIEWS],
                "settings": vars(c)}
    return results, (z.cpu(), labels[shown].cpu(), prototypes[:seen].cpu())


def summary(rows):
    """Rows of 1, 2, ..., T accuracies -> square matrix, null above the diagonal; AA; forgetting."""
    lost = forgetting(rows)
    return {"matrix": [row + [None] * (len(rows) - len(row)) for row in rows],
            "aa": average_accuracy(rows), "forgetting": None if math.isnan(lost) else lost}


# ------------------------------------------------------------------------ output

def show(value):
    return "-" if value is None else f"{value:.1f}"


def print_results(run, r):
    """The four matrices of a run, Class-IL beside Task-IL, and its summary lines."""
    c, T = r["settings"], r["tasks_finished"]
    print(f"\n{run}: {c['dataset']}, {c['plasticity']} + {c['stability']}, buffer {c['buffer']}, "
          f"seed {c['seed']}, {T} of {c['tasks']} tasks, {r['split']} images")
    width = max(6 * T, 10)
    for name, title in READOUTS.items():
        if name == "prototype" and c["plasticity"] == "supcon":     # never drawn to prototypes
            continue
        print(f"\n{title + ', %':<22}{KINDS['class_il']:<{width + 2}}{KINDS['task_il']}")
        names = "".join(f"{f'T{i + 1}':>6}" for i in range(T))
        print(f"{'':16}{names:<{width + 2}}{names}")
        for t in range(T):
            rows = ("".join(f"{show(a):>6}" for a in r[name][kind]["matrix"][t]) for kind in KINDS)
            print(f"  after task {t + 1:<3}" + f"{next(rows):<{width + 2}}" + next(rows))
        for key in ("aa", "forgetting"):
            cells = (f"{show(r[name][kind][key]):>6}" for kind in KINDS)
            print(f"  {'AA' if key == 'aa' else key:<14}{next(cells):<{width + 2}}{next(cells)}")
    (known, old), nc = r["old_classes_covered"][-1], r["nc"]
    if nc["nc1"] is not None:
        print("\nneural collapse: NC1 {nc1:.3f}, NC2 {nc2:.3f}, NC3 {nc3:.3f}, NC4 {nc4:.1f} %"
              .format(**nc))
    print(f"the last classifier had images of {known} of {old} old classes")


def print_table(all_results, mean):
    """A line for each run, then, if they may be averaged, mean +- sample standard deviation."""
    columns = [(name, kind, key) for name in READOUTS for kind in KINDS
               for key in ("aa", "forgetting")]
    print(f"\n{'':26}" + "".join(f"{title:<44}" for title in READOUTS.values()))
    print(f"{'':26}" + "".join(f"{title:<22}" for title in KINDS.values()) * 2)
    print(f"{'run':<26}" + f"{'AA':<11}{'forgetting':<11}" * 4)
    values = [[None if a == "prototype" and r["settings"]["plasticity"] == "supcon"
               else r[a][b][key] for r in all_results.values()] for a, b, key in columns]
    for run, row in zip(all_results, zip(*values)):
        print(f"{str(run)[-25:]:<26}" + "".join(f"{show(value):<11}" for value in row))
    if mean:
        cells = ["-" if None in v else f"{statistics.mean(v):.1f}+-{statistics.stdev(v):.1f}"
                 for v in values]
        print(f"{f'mean +- std, n = {len(all_results)}':<26}" + "".join(f"{a:<11}" for a in cells))


def tsne(x, perplexity=30, steps=400, seed=0):
    """Exact t-SNE (van der Maaten & Hinton 2008) of x (n, d) to (n, 2), for a picture."""
    n = len(x)
    d2 = torch.cdist(x, x).square()
    beta, low, high = torch.ones(n, 1), torch.zeros(n, 1), torch.full((n, 1), math.inf)
    for _ in range(50):                 # bisect each point's bandwidth to the wanted perplexity
        p = (-beta * d2).fill_diagonal_(-math.inf).softmax(1)
        wide = torch.special.entr(p).sum(1, keepdim=True) > math.log(perplexity)
        low, high = torch.where(wide, beta, low), torch.where(wide, high, beta)
        beta = torch.where(high.isinf(), 2 * beta, (low + high) / 2)
    p = (p + p.T) / (2 * n)
    y = 1e-2 * torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    velocity = torch.zeros_like(y)
    for step in range(steps):
        early = step < 100              # exaggerated attraction, less momentum
        q = (1 / (1 + torch.cdist(y, y).square())).fill_diagonal_(0)
        force = (p * (12 if early else 1) - q / q.sum()) * q
        gradient = 4 * (force.sum(1, keepdim=True) * y - force @ y)
        velocity = (0.5 if early else 0.8) * velocity - n / 12 * gradient
        y = y + velocity
    return y - y.mean(0)


def plot(folder, all_results, embeddings):
    """Write accuracy.png, tasks.png and embeddings.png, with a panel or a line for each run."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    folder, runs = Path(folder), list(all_results)
    folder.mkdir(parents=True, exist_ok=True)
    titles = {}
    for run in runs:
        s = all_results[run]["settings"]
        titles[run] = "{plasticity} + {stability}, buffer {buffer}, seed {seed}".format(**s)

    size = (8, 3.6 * len(runs))
    figure, axes = plt.subplots(len(runs), 2, figsize=size, squeeze=False, layout="constrained")
    for run, pair in zip(runs, axes):
        for kind, axis in zip(KINDS, pair):
            matrix = all_results[run]["linear"][kind]["matrix"]
            numbers = range(1, len(matrix) + 1)
            filled = [[math.nan if a is None else a for a in row] for row in matrix]
            picture = axis.imshow(filled, vmin=0, vmax=100)
            for t, i in ((t, i) for t in range(len(matrix)) for i in range(t + 1)):
                axis.text(i, t, f"{matrix[t][i]:.0f}", ha="center", va="center", fontsize=8,
                          color="black" if matrix[t][i] > 60 else "white")
            axis.set(xlabel="accuracy on task", ylabel="after task", xticks=range(len(matrix)),
                     yticks=range(len(matrix)), xticklabels=numbers, yticklabels=numbers)
            axis.set_title(f"{KINDS[kind]}: {titles[run]}", fontsize=9)
        figure.colorbar(picture, ax=list(pair), label="%")
    figure.savefig(folder / "accuracy.png", dpi=120)

    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for kind, axis in zip(KINDS, axes):
        for number, run in enumerate(runs):
            for name, style in (("linear", "-"), ("prototype", ":")):
                rows = all_results[run][name][kind]["matrix"]
                means = [statistics.mean(a for a in row if a is not None) for row in rows]
                axis.plot(range(1, len(rows) + 1), means, style, marker="o", color=f"C{number}",
                          label=f"{titles[run]}, {READOUTS[name]}")
        axis.set(title=KINDS[kind], xlabel="after task", ylabel="average accuracy, %",
                 ylim=(0, 102), xticks=range(1, len(rows) + 1))
        axis.grid(alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2,
                  fontsize=8)
    figure.savefig(folder / "tasks.png", dpi=120)

    size = (5 * len(runs), 5.8)
    figure, axes = plt.subplots(1, len(runs), figsize=size, squeeze=False, layout="constrained")
    for run, axis in zip(runs, axes[0]):
        z, y, prototypes = embeddings[run]
        K = len(prototypes)
        some = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))[:1000]
        flat = tsne(torch.cat([z[some], prototypes]))
        colours = plt.get_cmap("tab10" if K <= 10 else "nipy_spectral", K)
        axis.scatter(*flat[:-K].T, s=6, c=[colours(k) for k in y[some].tolist()], linewidths=0)
        for k, point in enumerate(flat[-K:].tolist()):
            axis.scatter(*point, marker="*", s=160, color=colours(k), edgecolors="black",
                         label=f"class {k}")
        axis.set(xticks=[], yticks=[])
        axis.set_title(titles[run], fontsize=9)
    if K <= 10:
        figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=5,
                      fontsize=8, markerscale=0.6)
    figure.suptitle("last embeddings (dots) and prototypes (stars), t-SNE", fontsize=10)
    figure.savefig(folder / "embeddings.png", dpi=120)
    plt.close("all")


# ------------------------------------------------------------------------ command line

def number(kind, low, high=math.inf, above=False):
    """An argparse type: a number of `kind`, low <= it <= high, or low < it if `above`."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or above and value == low or abs(value) == math.inf:
            word = "a whole number" if kind is int else "a number"
            limits = f"{'above' if above else 'from'} {low}" + f" to {high}" * (high < math.inf)
            raise argparse.ArgumentTypeError(f"{text!r} should be {word} {limits}")
        return value
    return parse


def pick_device(name):
    """--device as a torch.device; auto takes CUDA, then MPS, then the CPU."""
    if name == "auto":
        name = ("cuda" if torch.cuda.is_available() else
                "mps" if torch.backends.mps.is_available() else "cpu")
    with contextlib.suppress(RuntimeError, AssertionError):     # unknown, or not in this torch
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if device.type in ("cpu", "cuda", "mps"):
            return device
    raise Problem(f"--device {name} is not to be had here: give auto, cpu, or a cuda or mps device "
                  "that torch sees")


def command(main):
    """Run main(argv) as a program: what the user can mend ends it with one sentence, status 2."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (Problem, OSError) as problem:
        print(f"{Path(sys.argv[0]).name}: error: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def build_parser():
    """The flags; every one has a default."""
    parser = argparse.ArgumentParser(
        prog="eval.py", allow_abbrev=False, usage="python eval.py [RUN ...] [flags]",
        description="Linear and nearest-prototype evaluation of runs of train.py.")
    flag = parser.add_argument
    flag("runs", nargs="*", metavar="RUN", help="run folders; none: the newest under runs/")
    flag("--epochs", type=number(int, 1, 10**6), default=100, help="of the classifier (100)")
    flag("--lr", type=number(float, 0, 1000, above=True), default=0.1, help="its rate (0.1)")
    flag("--probe-samples", type=number(int, 0, 10**7), default=200,
         help="old images for the classifier of a run without buffer (200)")
    flag("--split", choices=["test", "val"], default="test", help="val: what --val-fraction kept")
    flag("--plot", metavar="DIR", help="write accuracy.png, tasks.png and embeddings.png there")
    flag("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (auto)")
    flag("--data-dir", metavar="DIR", help="where the data is, if not where the run found it")
    return parser


def main(argv):
    """Evaluate the runs named, or the newest; print, write results.json, and draw if asked."""
    args = build_parser().parse_args(argv)
    runs, device = [Path(run) for run in args.runs], pick_device(args.device)
    if not runs:
        newest = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
        if not newest:
            raise Problem("there is no run under runs/: python train.py makes one, or name one")
        runs = [newest[-1].parent]
    if len(set(runs)) < len(runs):
        raise Problem(f"the run {max(runs, key=runs.count)} is named twice")
    if args.plot:
        try:
            import matplotlib                                   # noqa: F401, before the long work
        except ImportError:
            raise Problem("--plot needs matplotlib: pip install matplotlib") from None
    difference = compare(runs)
    if difference and not args.plot:
        raise Problem(f"{difference}: they cannot be averaged; --plot shows them side by side")
    all_results, embeddings = {}, {}
    for run in runs:
        all_results[run], embeddings[run] = evaluate(
            run, epochs=args.epochs, lr=args.lr, probe_samples=args.probe_samples,
            split=args.split, device=device, data_dir=args.data_dir)
        path = run / ("results.json" if args.split == "test" else "results-val.json")
        write(path, json.dumps(all_results[run], indent=1).encode())
        print_results(run, all_results[run])
        print(f"written to {path}")
    if len(runs) > 1:
        print_table(all_results, mean=not difference)
    if args.plot:
        plot(args.plot, all_results, embeddings)
        print(f"pictures in {args.plot}: accuracy.png, tasks.png, embeddings.png")


if __name__ == "__main__":
    command(main)
