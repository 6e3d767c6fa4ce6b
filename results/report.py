"""Tables of the results.json files kept in a folder, and the curve of average accuracy over tasks.

    python results/report.py results/cifar10                # Markdown on the screen
    python results/report.py results/cifar10 --plot hsd co2l none       # and FOLDER/methods.png

NAME-<seed>.json of all seeds make one row: mean +- sample standard deviation over n seeds.
"""

import argparse
import json
import re
import statistics
from pathlib import Path

LABELS = {"hsd": "FNC2 + HSD", "ird": "FNC2 + IRD", "sprd": "FNC2 + S-PRD", "none": "FNC2 alone",
          "noreplay": "FNC2 + HSD, no pseudo-replay", "supcon": "SupCon alone",
          "co2l": "SupCon + IRD = Co2L", "joint": "joint training"}


def load(folder):
    """{name: [results of each seed]}, in alphabetical order."""
    runs = {}
    for path in sorted(Path(folder).glob("*.json")):
        name = re.fullmatch(r"(.+)-(\d+)", path.stem)[1]
        runs.setdefault(name, []).append(json.loads(path.read_text()))
    return runs


def label(name):
    """hsd-buffer200 -> FNC2 + HSD, buffer 200."""
    method, *rest = name.split("-")
    return ", ".join([LABELS[method], *(re.sub(r"(\d)", r" \1", part, count=1) for part in rest)])


def cell(values):
    if None in values:
        return "-"
    spread = f" +- {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def tables(runs):
    columns = [(readout, kind, key) for readout, keys in
               (("linear", ("aa", "forgetting")), ("prototype", ("aa",)))
               for key in keys for kind in ("class_il", "task_il")]
    print("| losses | n | Class-IL AA | Task-IL AA | forgetting, Class-IL | forgetting, Task-IL | "
          "nearest prototype, Class-IL | Task-IL |\n" + "|---" * 8 + "|")
    for name, seeds in runs.items():
        no_prototypes = seeds[0]["settings"]["plasticity"] == "supcon"
        cells = ["-" if no_prototypes and a == "prototype" else cell([r[a][b][key] for r in seeds])
                 for a, b, key in columns]
        print(f"| {label(name)} | {len(seeds)} | " + " | ".join(cells) + " |")
    print("\nLinear classifier, Class-IL / Task-IL AA of every seed:")
    for name, seeds in runs.items():
        print(f"{label(name)}: " + ", ".join("{:.2f} / {:.2f}".format(
            *(r["linear"][kind]["aa"] for kind in ("class_il", "task_il"))) for r in seeds))


def plot(runs, names, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for axis, (kind, title) in zip(axes, (("class_il", "Class-IL"), ("task_il", "Task-IL"))):
        for number, name in enumerate(names):
            curves = [[statistics.mean(a for a in row if a is not None)
                       for row in r["linear"][kind]["matrix"]] for r in runs[name]]
            means = [statistics.mean(points) for points in zip(*curves)]
            spread = [statistics.stdev(points) if len(points) > 1 else 0 for points in zip(*curves)]
            axis.errorbar([t + 1 + 0.03 * number for t in range(len(means))], means, spread,
                          marker="o", markersize=4, capsize=2, label=label(name))
        axis.set(title=title, xlabel="after task", ylabel="average accuracy so far, %",
                 xticks=range(1, len(means) + 1))
        axis.grid(alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--plot", nargs="+", metavar="NAME", help="runs to draw")
    args = parser.parse_args()
    runs = load(args.folder)
    tables(runs)
    if args.plot:
        plot(runs, args.plot, Path(args.folder) / "methods.png")
