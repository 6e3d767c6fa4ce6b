"""Tables of the results kept in a folder: NAME-<seed>.json, and NAME-<seed>.jsonl, the log.

    python results/report.py results/cifar10                # Markdown: a table for each readout
    python results/report.py results/cifar10 --learning     # how far each task's loss went
    python results/report.py results/cifar10 --paper        # beside the paper's Table 1

All seeds of a NAME make one row: mean ± sample standard deviation over n seeds; best AA in bold.
NAME-probe0 is the linear readout of NAME again, without old images (eval.py --probe-samples 0).
"""

import argparse
import json
import math
import re
import statistics
from pathlib import Path

LABELS = {"hsd": "FNC2 + HSD", "ird": "FNC2 + IRD", "sprd": "FNC2 + S-PRD", "none": "FNC2 alone",
          "noreplay": "FNC2 + HSD, no pseudo-replay", "supcon": "SupCon alone",
          "co2l": "SupCon + IRD = Co2L", "cila": "CILA", "er": "ER", "der": "DER",
          "derpp": "DER++", "icarl": "iCaRL", "gem": "GEM", "gss": "GSS", "gcr": "GCR",
          "joint": "joint training"}
READOUTS = {"linear": "Linear classifier", "image_free": "Image-free",
            "image_free_old": "Image-free, earlier version (last stage, the task's own images)",
            "head": "The method's own head", "prototype": "Nearest prototype"}
# Table 1 of the paper, CIFAR-10: Class-IL / Task-IL AA by buffer. DER++ is from CILA's paper.
PAPER = {0: {"co2l": "58.89 / 86.65", "hsd": "69.26 / 94.41"},
         200: {"er": "44.79 / 91.19", "icarl": "49.02 / 88.99", "gem": "25.54 / 90.44",
               "gss": "39.07 / 88.80", "der": "61.93 / 91.40", "derpp": "64.88 / 91.92",
               "co2l": "65.57 / 93.43", "gcr": "64.84 / 90.80", "cila": "67.06 / 94.29",
               "hsd": "72.63 / 95.31"}}
KINDS = ("class_il", "task_il")


def load(folder):
    """{name: [results of each seed]}, in the order of LABELS."""
    runs, order = {}, list(LABELS)
    for path in sorted(Path(folder).glob("*-*.json")):
        runs.setdefault(path.stem.rpartition("-")[0], []).append(r := json.loads(path.read_text()))
        if (log := path.with_suffix(".jsonl")).exists():
            r["log"] = [json.loads(line) for line in log.read_text().splitlines()]
    return {name: runs[name] for name in sorted(
        runs, key=lambda name: (order.index(name.split("-")[0]), name))}


def label(name):
    """hsd-buffer200 -> FNC2 + HSD, buffer 200."""
    method, *rest = name.split("-")
    return ", ".join([LABELS[method], *("0 old images" if part == "probe0" else re.sub(
        r"(\d)", r" \1", part, count=1) for part in rest)])


def cell(values):
    spread = f" ± {statistics.stdev(values):.1f}" if values[1:] and None not in values else ""
    return "-" if None in values else f"{statistics.mean(values):.1f}{spread}"


def table(runs, readout):
    """Print AA and forgetting of one readout, Class-IL and Task-IL."""
    rows = {name: [r for r in seeds if readout in r and (
                readout != "prototype" or r["settings"]["plasticity"] == "fnc2")]
            for name, seeds in runs.items() if readout == "linear" or not name.endswith("probe0")}
    rows = {name: seeds for name, seeds in rows.items() if seeds}
    mean = lambda name, kind: statistics.mean(r[readout][kind]["aa"] for r in rows[name])
    equal = [name for name in rows if not re.match("joint|.*-epochs", name)]        # in budget
    best = [max((mean(name, kind) for name in equal), default=None) for kind in KINDS]
    if rows:
        print(f"\n{READOUTS[readout]}:\n\n| losses | n | Class-IL AA | Task-IL AA | forgetting, "
              "Class-IL | forgetting, Task-IL |\n" + "|---" * 6 + "|")
    for name, seeds in rows.items():
        cells = [cell([r[readout][kind][key] for r in seeds])
                 for key in ("aa", "forgetting") for kind in KINDS]
        for i, kind in enumerate(KINDS):
            if mean(name, kind) == best[i] and len(rows) > 1:
                cells[i] = f"**{cells[i]}**"
        print(f"| {label(name)} | {len(seeds)} | " + " | ".join(cells) + " |")


def chance(entry, settings):
    """The plasticity loss where all similarities are equal, about ln(2N-1 + old prototypes).

    entry: a line of the log; images that an epoch went through are half its views.
    """
    images = round(entry["views_per_second"] * entry["seconds"] / 2)
    old = (entry["task"] - 1) * len(settings["classes"]) // settings["tasks"]
    others, focus = 2 * min(settings["batch_size"], images) - 1, 1
    if settings["plasticity"] == "fnc2":
        off = settings.get("no_pseudo_replay") or not settings.get("pseudo_replay", True)
        others += 0 if off else old                         # the first name is of older runs
        focus = (1 - 1 / others) ** settings["gamma"]
    stored = settings["buffer"] if old else 0               # views of stored images count 0
    return math.log(others) * focus * (1 - stored / images)


def learning(runs):
    """Print how far below chance each task's plasticity loss ended, and Task-IL when it was new."""
    print("\n| losses | n | loss below chance at the end of tasks 1, 2, ..., % | Task-IL of each "
          "task when new, linear |\n|---|---|---|---|")
    for name, seeds in runs.items():
        seeds = [r for r in seeds if "plasticity" in r.get("log", [{}])[-1]]    # not of baselines
        if seeds and not name.startswith("joint"):
            T = len(seeds[0]["linear"]["task_il"]["matrix"])
            below, new = [[] for _ in range(T)], [[] for _ in range(T)]
            for r in seeds:
                for e in {e["task"]: e for e in r["log"]}.values():     # last epoch of each task
                    below[e["task"] - 1].append(1 - e["plasticity"] / chance(e, r["settings"]))
                for t in range(T):
                    new[t].append(r["linear"]["task_il"]["matrix"][t][t] / 100)
            cells = [", ".join(f"{100 * statistics.mean(v):.1f}" if v else "-" for v in columns)
                     for columns in (below, new)]
            print(f"| {label(name)} | {len(seeds)} | {cells[0]} | {cells[1]} |")


def paper(runs):
    """Print Class-IL / Task-IL AA by every readout, beside the paper's Table 1."""
    earlier = any("image_free_old" in r for seeds in runs.values() for r in seeds)
    print("\n| buffer | method | n | its own classifier | linear | image-free"
          + ", earlier" * earlier + " | the paper, full scale |\n" + "|---" * 7 + "|")
    for buffer, name in ((buffer, name) for buffer in PAPER for name in PAPER[buffer]):
        seeds = runs.get(f"{name}-buffer{buffer}" if buffer else name, [])
        cells = [" / ".join(cell([r[readout][kind]["aa"] for r in seeds]) for kind in KINDS)
                 if seeds and readout in seeds[0] else "-" if seeds else "not run"
                 for readout in ("head", "linear", "image_free" + "_old" * earlier)]
        print(f"| {buffer} | {LABELS[name]} | {len(seeds)} | {' | '.join(cells)} "
              f"| {PAPER[buffer][name]} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--learning", action="store_true", help="each task's loss and accuracy")
    parser.add_argument("--paper", action="store_true", help="beside the paper's Table 1")
    args = parser.parse_args()
    runs = load(args.folder)
    if args.learning or args.paper:
        (learning if args.learning else paper)(runs)
    else:
        for readout in READOUTS:
            table(runs, readout)
