"""How many dimensions a network uses: the participation ratio (sum e)^2 / sum e^2 of the eigenvalues
e of the covariance of test images, for embeddings z and features h after the first and last task.

    python results/dimension.py runs/cifar10/hsd-0 runs/cifar10/co2l-0
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import eval as evaluation
from data import normalise


def participation_ratio(v):
    e = torch.linalg.svdvals(v - v.mean(0)).square()
    return (e.sum() ** 2 / e.square().sum()).item()


for run in sys.argv[1:]:
    c, finished = evaluation.open_run(run)
    data = evaluation.load_data(c, torch.device("cpu"))
    for t in (1, len(finished)):
        _, net = evaluation.load_task(finished[t - 1], c, "cpu")
        h, z = evaluation.encode(net, data.test_images[::5],
                                 lambda x: normalise(x, data.views["mean"], data.views["std"]))
        print(f"{run} after task {t}: z {participation_ratio(z):.2f}, h {participation_ratio(h):.2f}")
