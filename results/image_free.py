"""What the image-free readout is made of: its parts and constants, on finished runs.

    python results/image_free.py [--split val] RUN ...

Prints Class-IL / Task-IL AA after the last task, mean over the runs, of the readout and its variants.
The oracle has the true statistics of all classes under the last encoder, from images that nobody may
keep: what separates it from the readout is drift that the map did not follow.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
import eval as evaluation
from data import normalise, of_classes
from train import command, load_data, load_task, open_run

VARIANTS = {"image-free": {}, "ridge 0.0001": {"ridge": 1e-4}, "ridge 0.01": {"ridge": 1e-2},
            "shrink 0.01": {"shrink": 0.01}, "shrink 0.02": {"shrink": 0.02},
            "shrink 0.1": {"shrink": 0.1}, "shrink 0.2": {"shrink": 0.2},
            "ridge towards no change": {"identity": True},
            "without R": {"residual": False}, "not carried": {"carried": False},
            "nearest mean, carried": {"means": True},
            "nearest mean, not carried": {"means": True, "carried": False},
            "oracle: true statistics": {"oracle": True}}


def read_out(features, labels, test, tasks, *, ridge=1e-3, shrink=0.05, identity=False,
             residual=True, carried=True, means=False, oracle=False):
    """features[t][i]: task i's training images by encoder t; test: (n, F) by the last encoder."""
    kept = None
    for t in range(len(features)):
        new = evaluation.class_statistics(features[t][t], labels[t])
        if t and carried:
            before, after = features[t - 1][t], features[t][t]
            W, b, R = evaluation.fit_map(before, after - before if identity else after, ridge)
            W = W + torch.eye(len(W), dtype=W.dtype) if identity else W
            kept = evaluation.carry(*kept, W, b, R if residual else 0 * R)
        kept = evaluation.join(*kept, *new) if t else new
    if oracle:
        kept = evaluation.class_statistics(torch.cat(features[-1]), torch.cat(labels))
    if means:
        return -torch.cdist(test, kept[0])
    return F.linear(test, *evaluation.discriminant(*kept, shrink=shrink))


def main(argv):
    parser = argparse.ArgumentParser(prog="image_free.py", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--split", choices=["test", "val"], default="test")
    args = parser.parse_args(argv)
    found = {name: [] for name in VARIANTS}
    for run in args.runs:
        c, finished = open_run(run)
        data = load_data(c, "cpu")
        plain = lambda x: normalise(x, data.recipe["mean"], data.recipe["std"])
        images, y = ((data.test_images, data.test_labels) if args.split == "test" else
                     (data.val_images, data.val_labels))
        mine = [of_classes(data.train_labels, classes) for classes in data.tasks]
        labels = [data.train_labels[m] for m in mine]
        features = []
        for t, file in enumerate(finished):
            net = load_task(file, c, "cpu")[1]
            wanted = range(len(mine)) if t == len(finished) - 1 else (t, t + 1)
            features.append({i: evaluation.encode(net, data.train_images[mine[i]], plain)[0].double()
                             for i in wanted})
        features[-1] = [features[-1][i] for i in range(len(mine))]
        test = evaluation.encode(net, images, plain)[0].double()
        for name, options in VARIANTS.items():
            rows = evaluation.accuracies(read_out(features, labels, test, data.tasks, **options), y,
                                         data.tasks)
            found[name].append([sum(row) / len(row) for row in rows])
    print(f"{len(args.runs)} runs, {args.split} images: Class-IL / Task-IL AA")
    for name, pairs in found.items():
        print(f"{name:<28}" + " / ".join(f"{statistics.mean(v):.1f}" for v in zip(*pairs)))


if __name__ == "__main__":
    command(main)
