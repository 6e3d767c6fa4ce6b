"""Tables of the results kept in a folder, NAME-<seed>.json with NAME-<seed>.jsonl, the log, beside it.

    python results/report.py results/cifar10                # Markdown: a table for each readout
    python results/report.py results/cifar10 --learning     # how far each task's loss went
    python results/report.py results/cifar10 --plot hsd co2l none       # and FOLDER/methods.png

All seeds of a NAME make one row: mean ± sample standard deviation over n seeds; best AA in bold.
"""

import argparse
import json
import re
import statistics
from pathlib import Path

LABELS = {"hsd": "FNC2 + HSD", "ird": "FNC2 + IRD", "sprd": "FNC2 + S-PRD", "none": "FNC2 alone",
          "noreplay": "FNC2 + HSD, no pseudo-replay", "supcon": "SupCon alone",
          "co2l": "SupCon + IRD = Co2L", "predictor": "FNC2 + HSD, predictor",
          "authors": "the authors' settings", "er": "ER",
          "der": "DER", "derpp": "DER++", "icarl": "iCaRL", "gem": "GEM", "gss": "GSS",
          "joint": "joint training"}
READOUTS = {"linear": "Linear classifier", "image_free": "Image-free", "head": "The method's own head",
            "prototype": "Nearest prototype"}
COLUMNS = [(key, kind) for key in ("aa", "forgetting") for kind in ("class_il", "task_il")]


def load(folder):
    """{name: [results of each seed]}, in the order of LABELS."""
    runs = {}
    for path in sorted(Path(folder).glob("*.json")):
        if not (match := re.fullmatch(r"(.+)-(\d+)", path.stem)):
            continue                            # alone.json is no run
        name = match[1]
        runs.setdefault(name, []).append(json.loads(path.read_text()))
        log = path.with_suffix(".jsonl")
        if log.exists():
            runs[name][-1]["log"] = [json.loads(line) for line in log.read_text().splitlines()]
    return dict(sorted(runs.items(), key=lambda item: (
        list(LABELS).index(item[0].split("-")[0]), item[0])))


def label(name):
    """hsd-buffer200 -> FNC2 + HSD, buffer 200."""
    method, *rest = name.split("-")
    return ", ".join([LABELS[method], *(re.sub(r"(\d)", r" \1", part, count=1) for part in rest)])


def cell(values):
    if None in values:
        return "-"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def table(runs, readout):
    """One readout: AA and forgetting, Class-IL and Task-IL."""
    rows = {name: [r for r in seeds if readout in r] for name, seeds in runs.items()}
    if readout == "prototype":
        rows = {name: [r for r in seeds if r["settings"]["plasticity"] == "fnc2"]
                for name, seeds in rows.items()}
    rows = {name: seeds for name, seeds in rows.items() if seeds}
    if not rows:
        return
    print(f"\n{READOUTS[readout]}:\n\n| losses | n | Class-IL AA | Task-IL AA | forgetting, Class-IL "
          "| forgetting, Task-IL |\n" + "|---" * 6 + "|")
    mean = lambda seeds, kind: statistics.mean(r[readout][kind]["aa"] for r in seeds)
    best = {kind: max((mean(seeds, kind) for name, seeds in rows.items()
                       if not name.startswith("joint")), default=None)
            for kind in ("class_il", "task_il")}
    for name, seeds in rows.items():
        cells = [cell([r[readout][kind][key] for r in seeds]) for key, kind in COLUMNS]
        for i, kind in enumerate(("class_il", "task_il")):
            if mean(seeds, kind) == best[kind] and len(rows) > 1:
                cells[i] = f"**{cells[i]}**"
        print(f"| {label(name)} | {len(seeds)} | " + " | ".join(cells) + " |")


def learning(runs, folder):
    """How far below chance each task's plasticity loss ended, %, and Task-IL when it was new."""
    print("\n| losses | n | loss below chance at the end of tasks 1, 2, ..., % | Task-IL of each task "
          "when new, linear |\n|---|---|---|---|")
    for name, seeds in runs.items():
        seeds = [r for r in seeds if "chance" in r.get("log", [{}])[-1]]    # not of baselines
        if not seeds:
            continue
        below, new = [], []
        for r in seeds:
            T = len(r["linear"]["task_il"]["matrix"])
            ends = {e["task"] - 1: 100 * (1 - e["plasticity"] / e["chance"]) for e in r["log"]}
            below += ends.items()               # the last epoch of each task; --init has no task 1
            new += [(t, r["linear"]["task_il"]["matrix"][t][t]) for t in range(T)]
        show = lambda pairs, digits: ", ".join(
            "-" if not values else f"{statistics.mean(values):.{digits}f}" for values in (
                [v for u, v in pairs if u == t] for t in range(T)))
        print(f"| {label(name)} | {len(seeds)} | {show(below, 1)} | {show(new, 1)} |")
    if (alone := Path(folder) / "alone.json").exists():
        found = json.loads(alone.read_text())["accuracy"]
        print(f"| a network for each task alone | 1 | - | {', '.join(f'{a:.1f}' for a in found)} |")


def plot(runs, names, path):
    """Average accuracy over tasks of the linear (solid) and image-free (dotted) readouts."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for axis, (kind, title) in zip(axes, (("class_il", "Class-IL"), ("task_il", "Task-IL"))):
        for number, name in enumerate(names):
            for readout, style in (("linear", "-"), ("image_free", ":")):
                curves = [[statistics.mean(a for a in row if a is not None)
                           for row in r[readout][kind]["matrix"]] for r in runs[name]]
                means = [statistics.mean(points) for points in zip(*curves)]
                spread = [statistics.stdev(points) if len(points) > 1 else 0
                          for points in zip(*curves)]
                axis.errorbar([t + 1 + 0.03 * number for t in range(len(means))], means, spread,
                              marker="o", markersize=4, capsize=2, color=f"C{number}",
                              linestyle=style, label=f"{label(name)}"
                              + (", image-free" if readout == "image_free" else ""))
        axis.set(title=title, xlabel="after task", ylabel="average accuracy so far, %",
                 xticks=range(1, len(means) + 1))
        axis.grid(alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2,
                  fontsize=8)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--learning", action="store_true", help="each task's loss and first accuracy")
    parser.add_argument("--plot", nargs="+", metavar="NAME", help="runs to draw")
    args = parser.parse_args()
    runs = load(args.folder)
    if args.learning:
        learning(runs, args.folder)
    else:
        for readout in READOUTS:
            table(runs, readout)
    if missing := set(args.plot or ()) - runs.keys():
        parser.error(f"no results of {', '.join(missing)} in {args.folder}")
    if args.plot:
        plot(runs, args.plot, Path(args.folder) / "methods.png")
