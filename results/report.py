"""Tables of the results kept in a folder: NAME-<seed>.json, and NAME-<seed>.jsonl, the log.

    python results/report.py results/cifar10-50                 # Markdown: AA by every readout
    python results/report.py results/cifar10-50 forgetting      # the same of forgetting
    python results/report.py results/cifar10-50 differences     # between methods, for each seed
    python results/report.py results/cifar10-50 learning        # how far each task's loss went
    python results/report.py results/cifar10-50 paper           # beside the paper's Table 2

All seeds of a NAME make one row: mean ± sample standard deviation over n seeds. Cells are Class-IL
/ Task-IL.
"""

import argparse
import json
import math
import re
import statistics
from pathlib import Path

LABELS = {"hsd": "FNC2 + HSD", "ird": "FNC2 + IRD", "sprd": "FNC2 + S-PRD", "none": "FNC2 alone",
          "noreplay": "FNC2 + HSD, no pseudo-replay", "supcon": "SupCon alone",
          "co2l": "Co2L (SupCon + IRD)", "cila": "CILA", "er": "ER", "der": "DER",
          "derpp": "DER++", "icarl": "iCaRL", "gem": "GEM", "gss": "GSS", "gcr": "GCR",
          "joint": "joint training"}
READOUTS = {"head": "its own classifier", "linear": "linear", "image_free": "image-free",
            "image_free_old": "image-free, earlier", "prototype": "nearest prototype"}
# Table 2 of the paper, CIFAR-10: Class-IL / Task-IL AA by buffer. DER++ is from DER's paper.
PAPER = {0: {"co2l": "58.89 / 86.65", "hsd": "69.26 / 94.41"},
         200: {"er": "44.79 / 91.19", "icarl": "49.02 / 88.99", "gem": "25.54 / 90.44",
               "gss": "39.07 / 88.80", "der": "61.93 / 91.40", "derpp": "64.88 / 91.92",
               "co2l": "65.57 / 93.43", "gcr": "64.84 / 90.80", "cila": "67.06 / 94.29",
               "hsd": "72.63 / 95.31"}}
# Its Tables 2 to 5: Class-IL AA with buffer 0, by the linear classifier.
ABLATION = {"hsd": 69.26, "co2l": 58.89, "ird": 63.65, "sprd": 64.17, "noreplay": 67.79,
            "none": 53.59, "supcon": 53.25}
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
    return ", ".join([LABELS[method], *(re.sub(r"(\d)", r" \1", part, count=1) for part in rest)])


def cell(values):
    spread = f" ± {statistics.stdev(values):.1f}" if values[1:] and None not in values else ""
    return "-" if None in values else f"{statistics.mean(values):.1f}{spread}"


def cells(seeds, readouts, key="aa"):
    """Class-IL / Task-IL by each readout; - where a method has no such readout."""
    def known(r, readout):
        return readout in r and (readout != "prototype" or r["settings"]["plasticity"] == "fnc2")
    return [" / ".join(cell([r[readout][kind][key] for r in seeds]) for kind in KINDS)
            if all(known(r, readout) for r in seeds) else "-" for readout in readouts]


def table(runs, key):
    """Print AA or forgetting by all readouts that the folder has."""
    readouts = [name for name in READOUTS if any(name in r for rs in runs.values() for r in rs)]
    title = {"aa": "average accuracy"}.get(key, key)
    print(f"\n| {title} | n | " + " | ".join(READOUTS[name] for name in readouts) + " |\n"
          + "|---" * (2 + len(readouts)) + "|")
    for name, seeds in runs.items():
        print(f"| {label(name)} | {len(seeds)} | {' | '.join(cells(seeds, readouts, key))} |")


def differences(runs):
    """Print AA minus AA for each seed: of FNC2 + HSD and others, FNC2 and SupCon, readouts."""
    names = [name for name in runs if re.fullmatch(r"[a-z0-9]+(-buffer\d+)?", name)]
    both = "linear", "image_free"
    pairs = [(("hsd", readout), (name, readout)) for readout in both for name in names
             if name != "hsd"]
    pairs += [(("ird", readout), ("co2l", readout)) for readout in both]
    pairs += [(("hsd", readout), (name, "head")) for name in names for readout in both]
    pairs += [((name, "image_free"), (name, "linear")) for name in names]
    published = runs["hsd"][0]["settings"]["dataset"] == "cifar10"
    print("\n| a value for each seed | Class-IL AA | Task-IL AA |" + published * " the paper |"
          + "\n" + "|---" * (3 + published) + "|")
    for (a, first), (b, second) in pairs:
        of_a, of_b = ({r["settings"]["seed"]: r[readout] for r in runs.get(name, []) if readout in r}
                      for name, readout in ((a, first), (b, second)))
        if seeds := sorted(of_a.keys() & of_b.keys()):
            found = [" ".join(f"{of_a[s][kind]['aa'] - of_b[s][kind]['aa']:+.1f}" for s in seeds)
                     for kind in KINDS]
            if published:
                known = first == second == "linear" and b in ABLATION
                found.append(f"{ABLATION[a] - ABLATION[b]:+.1f}" if known else "-")
            text = (f"{label(a)} over {label(b)}, {READOUTS[first]}" if first == second else
                    f"{label(a)}, {READOUTS[first]}, over {label(b)}, {READOUTS[second]}" if a != b
                    else f"{label(a)}, {READOUTS[first]} over {READOUTS[second]}")
            print(f"| {text} | {' | '.join(found)} |")


def chance(entry, settings):
    """The plasticity loss where all similarities are equal, about ln(2N-1 + old prototypes).

    entry: a line of the log; images that an epoch went through are half its views.
    """
    images = round(entry["views_per_second"] * entry["seconds"] / 2)
    old = (entry["task"] - 1) * len(settings["classes"]) // settings["tasks"]
    others, focus = 2 * min(settings["batch_size"], images) - 1, 1
    if settings["plasticity"] == "fnc2":
        others += old if settings.get("pseudo_replay", True) else 0
        focus = (1 - 1 / others) ** settings["gamma"]
    stored = settings["buffer"] if old else 0               # views of stored images count 0
    return math.log(others) * focus * (1 - stored / images)


def learning(runs):
    """Print how far below chance each task's plasticity loss ended, and accuracy when it was new:
    Task-IL by the linear readout, Class-IL by nearest prototypes."""
    print("\n| losses | n | loss below chance at the end of tasks 1, 2, ..., % | Task-IL of each "
          "task when new, linear | Class-IL when new, nearest prototype |\n|---|---|---|---|---|")
    for name, seeds in runs.items():
        seeds = [r for r in seeds if "plasticity" in r.get("log", [{}])[-1]]    # not of baselines
        if seeds and not name.startswith("joint"):
            T = len(seeds[0]["linear"]["task_il"]["matrix"])
            below, new, nearest = ([[] for _ in range(T)] for _ in range(3))
            for r in seeds:
                for e in {e["task"]: e for e in r["log"]}.values():     # last epoch of each task
                    below[e["task"] - 1].append(1 - e["plasticity"] / chance(e, r["settings"]))
                for t in range(T):
                    new[t].append(r["linear"]["task_il"]["matrix"][t][t] / 100)
                    if r["settings"]["plasticity"] == "fnc2":
                        nearest[t].append(r["prototype"]["class_il"]["matrix"][t][t] / 100)
            lists = [", ".join(f"{100 * statistics.mean(v):.1f}" if len(v) == len(seeds) else "-"
                               for v in columns) for columns in (below, new, nearest)]
            print(f"| {label(name)} | {len(seeds)} | {' | '.join(lists)} |")


def paper(runs):
    """Print the rows of the paper's Table 2, run or not: AA by every readout, and the paper's."""
    readouts = ["head", "linear", "image_free"]
    print("\n| buffer | method | n | " + " | ".join(READOUTS[name] for name in readouts)
          + " | the paper, full scale |\n" + "|---" * 7 + "|")
    for buffer, name in ((buffer, name) for buffer in PAPER for name in PAPER[buffer]):
        seeds = runs.get(f"{name}-buffer{buffer}" if buffer else name, [])
        shown = cells(seeds, readouts) if seeds else ["not run"] * 3
        print(f"| {buffer} | {LABELS[name]} | {len(seeds)} | {' | '.join(shown)} "
              f"| {PAPER[buffer][name]} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    tables = {"aa": lambda runs: table(runs, "aa"), "differences": differences, "paper": paper,
              "forgetting": lambda runs: table(runs, "forgetting"), "learning": learning}
    parser.add_argument("what", nargs="?", choices=list(tables), default="aa")
    args = parser.parse_args()
    runs = load(args.folder)
    if args.what == "differences" and "hsd" not in runs:
        parser.error(f"{args.folder} has no hsd-<seed>.json, with which others are compared")
    tables[args.what](runs)
