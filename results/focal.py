"""How much the focal factor of FNC2 does: gradients for gamma 0 and others on a run's own embeddings.

    python results/focal.py RUN [BATCH]
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
from buffer import ReservoirBuffer
from data import augment
from losses import fnc2_loss
from train import load_data, load_task, make_task, open_run

if len(sys.argv) < 2:
    sys.exit(__doc__)
c, finished = open_run(sys.argv[1])
N = int(sys.argv[2]) if len(sys.argv) > 2 else c.batch_size
data, g = load_data(c, "cpu"), torch.Generator().manual_seed(0)
for t, file in enumerate(finished, 1):
    state, net = load_task(file, c, "cpu")
    task, p = make_task(data, t, ReservoirBuffer(0), state["prototypes"]), state["prototypes"]
    batch = torch.randperm(len(task.labels), generator=g)[:N]
    with torch.no_grad():
        z = net.train()(augment(task.images[batch].repeat(2, 1, 1, 1), g, **task.recipe))
    y = task.labels[batch].repeat(2)
    plain, *others = (torch.func.grad(lambda z: fnc2_loss(
        z, y, p, p[:task.old], tau=c.tau, gamma=gamma))(z).flatten() for gamma in (0, 1, 4))
    print(f"after task {t}, {2 * N} views: " + "; ".join(
        f"gamma {gamma}: cosine with gamma 0 {F.cosine_similarity(plain, other, dim=0):.5f}, "
        f"length {100 * (other.norm() / plain.norm() - 1):+.1f} %"
        for gamma, other in zip((1, 4), others)))
