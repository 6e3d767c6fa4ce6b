"""Pictures of runs that eval.py has evaluated: accuracy.png (the matrices), tasks.png (average
accuracy over tasks) and embeddings.png (t-SNE of test images and prototypes).

    python results/plot.py RUN ... --out DIR
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
try:
    import matplotlib
    from sklearn.manifold import TSNE
except ImportError as error:
    print(f"plot.py: error: {error}: pip install matplotlib scikit-learn", file=sys.stderr)
    sys.exit(2)
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from data import Problem, normalise
from eval import KINDS, READOUTS, encode
from train import command, load_data, load_task, open_run


def title(r):
    return "{plasticity} + {stability}, buffer {buffer}, seed {seed}".format(**r["settings"])


def draw_matrices(path, results):
    """A row for each run: Class-IL and Task-IL accuracy of the linear readout, task by task."""
    size = (8, 3.6 * len(results))
    figure, axes = plt.subplots(len(results), 2, figsize=size, squeeze=False, layout="constrained")
    for r, pair in zip(results.values(), axes):
        for kind, axis in zip(KINDS, pair):
            matrix = r["linear"][kind]["matrix"]
            rows, columns = range(len(matrix)), range(len(matrix[0]))
            filled = [[math.nan if a is None else a for a in row] for row in matrix]
            picture = axis.imshow(filled, vmin=0, vmax=100)
            for t, i in ((t, i) for t in rows for i in columns if matrix[t][i] is not None):
                axis.text(i, t, f"{matrix[t][i]:.0f}", ha="center", va="center", fontsize=8,
                          color="black" if matrix[t][i] > 60 else "white")
            axis.set(xlabel="accuracy on task", ylabel="after task", xticks=columns, yticks=rows,
                     xticklabels=[i + 1 for i in columns], yticklabels=[t + 1 for t in rows])
            axis.set_title(f"{KINDS[kind]}: {title(r)}", fontsize=9)
        figure.colorbar(picture, ax=list(pair), label="%")
    figure.savefig(path, dpi=120)


def draw_tasks(path, results):
    """Average accuracy after each task, a colour for each run: linear and image-free readouts."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for kind, axis in zip(KINDS, axes):
        for number, r in enumerate(results.values()):
            for name, style in (("linear", "-"), ("image_free", ":")):
                rows = r[name][kind]["matrix"]
                means = [statistics.mean(a for a in row if a is not None) for row in rows]
                axis.plot(range(1, len(rows) + 1), means, style, marker="o", color=f"C{number}",
                          label=f"{title(r)}, {READOUTS[name]}")
        axis.set(title=KINDS[kind], xlabel="after task", ylabel="average accuracy, %",
                 ylim=(0, 102), xticks=range(1, len(rows) + 1))
        axis.grid(alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2,
                  fontsize=8)
    figure.savefig(path, dpi=120)


def draw_embeddings(path, results, count=1000):
    """t-SNE of the last embeddings of some test images (dots) and the prototypes (stars)."""
    size = (5 * len(results), 5.8)
    figure, axes = plt.subplots(1, len(results), figsize=size, squeeze=False, layout="constrained")
    for (run, r), axis in zip(results.items(), axes[0]):
        c, finished = open_run(run)
        data, (state, net) = load_data(c, "cpu"), load_task(finished[-1], c, "cpu")
        K = data.tasks[len(finished) - 1][-1] + 1
        shown = (data.test_labels < K).nonzero().squeeze(1)
        mixed = torch.randperm(len(shown), generator=torch.Generator().manual_seed(0))
        some = shown[mixed[:count]]
        plain = lambda x: normalise(x, data.recipe["mean"], data.recipe["std"])
        z = torch.cat([encode(net, data.test_images[some], plain)[1], state["prototypes"][:K]])
        flat = TSNE(perplexity=min(30, len(z) // 4), random_state=0).fit_transform(z.numpy())
        colours = plt.get_cmap("tab10" if K <= 10 else "nipy_spectral", K)
        labels = data.test_labels[some].tolist()
        axis.scatter(*flat[:-K].T, s=6, c=[colours(k) for k in labels], linewidths=0)
        for k, point in enumerate(flat[-K:]):
            axis.scatter(*point, marker="*", s=160, color=colours(k), edgecolors="black",
                         label=data.names[k] if K <= 10 else None)
        axis.set(xticks=[], yticks=[])
        axis.set_title(title(r), fontsize=9)
    if K <= 10:
        figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=5,
                      fontsize=8, markerscale=0.6)
    figure.suptitle("last embeddings (dots) and prototypes (stars), t-SNE", fontsize=10)
    figure.savefig(path, dpi=120)


def main(argv):
    """Draw the runs named."""
    parser = argparse.ArgumentParser(prog="plot.py", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", metavar="DIR", default="figures", help="(figures)")
    args = parser.parse_args(argv)
    results = {}
    for run in args.runs:
        path = Path(run) / "results.json"
        if not path.is_file():
            raise Problem(f"{path} does not exist: python eval.py {run} writes it")
        results[run] = json.loads(path.read_text())
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    draw_matrices(out / "accuracy.png", results)
    draw_tasks(out / "tasks.png", results)
    draw_embeddings(out / "embeddings.png", results)
    print(f"pictures in {out}: accuracy.png, tasks.png, embeddings.png")


if __name__ == "__main__":
    command(main)
