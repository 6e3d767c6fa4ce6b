"""Tables of the results kept in a folder, NAME-<seed>.json with NAME-<seed>.jsonl, the log, beside it.

    python results/report.py results/cifar10                # Markdown: a table for each readout
    python results/report.py results/cifar10 --learning     # how far each task's loss went
    python results/report.py results/cifar10 --paper        # beside the paper's Table 1
    python results/report.py results/cifar10 --plot hsd hsd:image_free er-buffer200:head    # FOLDER/methods.png

All seeds of a NAME make one row: mean ± sample standard deviation over n seeds; best AA in bold.
NAME-probe0 is the linear readout of NAME again, without old images (eval.py --probe-samples 0).
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
# Table 1 of the paper, CIFAR-10: Class-IL / Task-IL AA; DER++ is from CILA's paper.
PAPER = {"co2l": "58.89 / 86.65", "hsd": "69.26 / 94.41", "er-buffer200": "44.79 / 91.19",
         "icarl-buffer200": "49.02 / 88.99", "gem-buffer200": "25.54 / 90.44",
         "gss-buffer200": "39.07 / 88.80", "der-buffer200": "61.93 / 91.40",
         "derpp-buffer200": "64.88 / 91.92", "co2l-buffer200": "65.57 / 93.43",
         "hsd-buffer200": "72.63 / 95.31"}
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
    return ", ".join([LABELS[method], *("0 old images" if part == "probe0" else re.sub(
        r"(\d)", r" \1", part, count=1) for part in rest)])


def cell(values):
    if None in values:
        return "-"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def table(runs, readout):
    """One readout: AA and forgetting, Class-IL and Task-IL."""
    rows = {name: [r for r in seeds if readout in r] for name, seeds in runs.items()
            if readout == "linear" or not name.endswith("probe0")}
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
                       if not re.match("joint|.*-epochs", name)), default=None)     # equal budgets
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
        if not seeds or name.startswith("joint"):
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


def paper(runs):
    """Class-IL / Task-IL AA by every readout, buffers 0 and 200, beside the paper's Table 1."""
    print("\n| buffer | method | n | its own classifier | linear | image-free "
          "| the paper, full scale |\n" + "|---" * 7 + "|")
    for name, published in PAPER.items():
        method, *rest = name.split("-")
        seeds = runs.get(name, [])
        cells = [" / ".join(cell([r[readout][kind]["aa"] for r in seeds])
                            for kind in ("class_il", "task_il"))
                 if seeds and readout in seeds[0] else "-" if seeds else "not run"
                 for readout in ("head", "linear", "image_free")]
        print(f"| {200 if rest else 0} | {LABELS[method]} | {len(seeds)} | {' | '.join(cells)} "
              f"| {published} |")


def plot(runs, names, path):
    """Average accuracy over tasks of each NAME[:READOUT], linear where none is given."""
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for axis, (kind, title) in zip(axes, (("class_il", "Class-IL"), ("task_il", "Task-IL"))):
        for number, spec in enumerate(names):
            name, _, readout = spec.partition(":")
            curves = [[statistics.mean(a for a in row if a is not None)
                       for row in r[readout or "linear"][kind]["matrix"]] for r in runs[name]]
            means = [statistics.mean(points) for points in zip(*curves)]
            spread = [statistics.stdev(points) if len(points) > 1 else 0 for points in zip(*curves)]
            axis.errorbar([t + 1 + 0.03 * number for t in range(len(means))], means, spread,
                          marker="o", markersize=4, capsize=2, color=f"C{number}",
                          linestyle=":" if readout == "image_free" else "--" if readout else "-",
                          label=f"{label(name)}: {READOUTS[readout or 'linear'].lower()}")
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
    parser.add_argument("--paper", action="store_true", help="buffers 0 and 200 beside Table 1")
    parser.add_argument("--plot", nargs="+", metavar="NAME[:READOUT]", help="runs to draw")
    args = parser.parse_args()
    runs = load(args.folder)
    if args.learning:
        learning(runs, args.folder)
    elif args.paper:
        paper(runs)
    else:
        for readout in READOUTS:
            table(runs, readout)
    for name, _, readout in (spec.partition(":") for spec in args.plot or ()):
        if name not in runs or any((readout or "linear") not in r for r in runs[name]):
            parser.error(f"no {readout or 'linear'} results of {name} in {args.folder}")
    if args.plot:
        try:
            import matplotlib
        except ImportError:
            parser.error("--plot needs matplotlib: pip install matplotlib")
        matplotlib.use("Agg")
        plot(runs, args.plot, Path(args.folder) / "methods.png")
