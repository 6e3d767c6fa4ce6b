"""How well each task is learned by a network that learns nothing else: the mark for "when new".

    python results/alone.py --dataset cifar10 [train's flags]       # writes runs/alone/cifar10.json

Trains a fresh network on each task with the settings of a first task, and reads it out linearly.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
import eval as evaluation
import train


def only(name, classes):
    """A loader of some classes of a dataset, numbered from 0."""
    def load(root, size):
        images, labels, test_images, test_labels, names = data.LOADERS[name](root, size)
        mine, shown = (data.of_classes(y, classes) for y in (labels, test_labels))
        return (images[mine], labels[mine] - classes[0], test_images[shown],
                test_labels[shown] - classes[0], [names[k] for k in classes])
    return load


def main(argv):
    """One run for each task of the dataset, kept if it is there already."""
    name = train.parse(argv).dataset
    table, found = data.DATASETS[name], []
    for t, classes in enumerate(data.split_tasks(table["classes"], table["tasks"]), 1):
        alone, out = f"{name}-task{t}", Path(f"runs/alone/{name}-task{t}")
        data.DATASETS[alone] = table | {"classes": len(classes), "tasks": 1}
        data.LOADERS[alone], train.PRESETS[alone] = only(name, classes), train.PRESETS[name]
        flags = ["--dataset", alone, "--tasks", "1", "--out", str(out)]
        if not (out / "task1.pt").exists():
            train.main(argv + flags + ["--resume"] * (out / "config.json").exists())
        found.append(evaluation.evaluate(out)["linear"]["class_il"]["aa"])
    path = Path(f"runs/alone/{name}.json")
    path.write_text(json.dumps({"flags": argv, "accuracy": found}))
    print(f"accuracy of each task alone: {', '.join(f'{a:.1f}' for a in found)}; written: {path}")


if __name__ == "__main__":
    train.command(main)
