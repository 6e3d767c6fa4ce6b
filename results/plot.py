"""Pictures of evaluated runs, and of results that are kept in a folder.

    python results/plot.py RUN ... [--out DIR]      # accuracy.png, tasks.png, embeddings.png
    python results/plot.py --kept FOLDER NAME[:READOUT] ... [--out FILE]

That is the matrices of the linear readout, average accuracy after each task, and a t-SNE of test
images and prototypes after each task. --kept: average accuracy over the seeds of each NAME.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
try:
    import matplotlib
    from sklearn.manifold import TSNE
except ImportError as error:
    print(f"plot.py: error: {error}: pip install matplotlib scikit-learn", file=sys.stderr)
    sys.exit(2)
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import report
from analysis import opened
from data import refuse
from eval import KINDS, encode
from train import command, load_net

STYLES = {"linear": "-", "image_free": ":", "head": "--", "prototype": "-."}


def title(r):
    return "{plasticity} + {stability}, buffer {buffer}, seed {seed}".format(**r["settings"])


def draw_matrices(path, results):
    """A row for each run: Class-IL and Task-IL accuracy of the linear readout, task by task."""
    figure, axes = plt.subplots(len(results), 2, figsize=(8, 3.6 * len(results)), squeeze=False,
                                layout="constrained")
    for r, pair in zip(results.values(), axes):
        for kind, axis in zip(KINDS, pair):
            matrix = r["linear"][kind]["matrix"]
            rows, columns = len(matrix), len(matrix[0])
            axis.imshow([[float("nan") if a is None else a for a in row] for row in matrix],
                        vmin=0, vmax=100, extent=(0.5, columns + 0.5, rows + 0.5, 0.5))
            for t, row in enumerate(matrix, 1):
                for i, a in enumerate(row, 1):
                    axis.text(i, t, "" if a is None else f"{a:.0f}", ha="center", va="center",
                              color="white" if (a or 0) < 60 else "black")
            axis.set(xlabel="accuracy on task, %", xticks=range(1, columns + 1),
                     ylabel="after task", yticks=range(1, rows + 1))
            axis.set_title(f"{KINDS[kind]}: {title(r)}", fontsize=9)
    figure.savefig(path, dpi=120)


def draw_tasks(path, groups):
    """Average accuracy after each task: {(label, readout): results of the seeds}, a line each."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
    names = list(dict.fromkeys(name for name, _ in groups))             # a colour each
    for kind, axis in zip(KINDS, axes):
        for i, ((name, readout), seeds) in enumerate(groups.items()):
            curves = [[statistics.mean(a for a in row if a is not None)
                       for row in r[readout][kind]["matrix"]] for r in seeds]
            points = list(zip(*curves))                     # of all seeds after each task
            axis.errorbar([t + 1 + 0.03 * i for t in range(len(points))],
                          [statistics.mean(p) for p in points],
                          [statistics.stdev(p) if len(p) > 1 else 0 for p in points],
                          linestyle=STYLES[readout], marker="o", markersize=4, capsize=2,
                          color=f"C{names.index(name)}",
                          label=f"{name}: {report.READOUTS[readout]} (n = {len(seeds)})")
        axis.set(title=KINDS[kind], xlabel="after task", xticks=range(1, len(points) + 1),
                 ylabel="average accuracy on the tasks so far, %")
        axis.grid(alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)


def draw_embeddings(path, results, count=400):
    """t-SNE of the same test images after every task (dots) and of the prototypes (stars): one for
    all tasks of a run, so that positions can be compared along a row. It keeps neighbours and not
    distances; a star that no image is near may lie anywhere."""
    T = max(len(r["linear"]["class_il"]["matrix"]) for r in results.values())
    figure, axes = plt.subplots(len(results), T, squeeze=False, layout="constrained",
                                figsize=(3 * T, 3.2 * len(results) + 0.5))
    for (run, r), row in zip(results.items(), axes):
        c, data, files, images, labels, plain = opened(run, "test", "cpu")
        some = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:count]
        K, shown, parts = data.tasks[len(files) - 1][-1] + 1, [], []
        for t, file in enumerate(files):
            net, state = load_net(file, c, "cpu")
            shown.append(some[labels[some] <= data.tasks[t][-1]])
            parts.append(encode(net.eval(), images[shown[-1]], plain))
        z = torch.cat([*parts, state["prototypes"][:K if c.plasticity == "fnc2" else 0]])
        flat = TSNE(perplexity=min(30, len(z) // 4), random_state=0).fit_transform(z.numpy())
        colours = plt.get_cmap("tab10" if K <= 10 else "nipy_spectral", K)
        *parts, stars = torch.tensor(flat).split([*map(len, parts), len(z) - sum(map(len, parts))])
        limits = [(v.min() - 4, v.max() + 4) for v in flat.T]
        for t, axis in enumerate(row):
            axis.set(xticks=[], yticks=[], xlim=limits[0], ylim=limits[1])
            axis.set_title(f"after task {t + 1}" + (f": {title(r)}" if t == 0 else ""), fontsize=8)
            if t < len(files):
                axis.scatter(*parts[t].T, s=7, linewidths=0, c=colours(labels[shown[t]].numpy()))
                axis.scatter(*stars.T, marker="*", s=130, c=colours(range(len(stars))),
                             edgecolors="black")
    if K <= 10:
        dots = [plt.Line2D([], [], marker="o", linestyle="", color=colours(k)) for k in range(K)]
        figure.legend(dots, data.names[:K], loc="outside lower center", ncols=K, fontsize=8)
    figure.savefig(path, dpi=120)


def main(argv):
    """Draw the runs named, or with --kept the names in the folder."""
    parser = argparse.ArgumentParser(prog="plot.py", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", metavar="RUN", help="or NAME[:READOUT] with --kept")
    parser.add_argument("--kept", metavar="FOLDER", help="draw results kept there")
    parser.add_argument("--out", help="folder (figures); with --kept a file (FOLDER/methods.png)")
    args = parser.parse_args(argv)
    if args.kept:
        runs, groups, out = report.load(args.kept), {}, args.out or f"{args.kept}/methods.png"
        for name, readout in ((name + ":linear").split(":")[:2] for name in args.names):
            refuse(not all(readout in r for r in runs.get(name, [{}])),
                   f"there are no {readout} results of {name} in {args.kept}")
            groups[report.label(name), readout] = runs[name]
        draw_tasks(out, groups)
        return print(f"written: {out}")
    results, out = {}, Path(args.out or "figures")
    for run in args.names:
        path = Path(run) / "results.json"
        refuse(not path.is_file(), f"{path} does not exist: python eval.py {run} writes it")
        results[run] = json.loads(path.read_text())
    out.mkdir(parents=True, exist_ok=True)
    draw_matrices(out / "accuracy.png", results)
    draw_tasks(out / "tasks.png", {(f"{Path(run).name}: {title(r)}", readout): [r]
                                   for run, r in results.items()
                                   for readout in ("linear", "image_free")})
    draw_embeddings(out / "embeddings.png", results)
    print(f"pictures in {out}: accuracy.png, tasks.png, embeddings.png")


if __name__ == "__main__":
    command(main)
