"""The rehearsal methods of the paper's Table 1, on our network, data, tasks and metrics.

    python results/baselines.py --method er --dataset cifar10 --buffer 200 --epochs 15 [--out RUN]

Methods: er, der, derpp, icarl, gem, gss. Data and running flags are train.py's (--dataset, --tasks,
--buffer, --image-size, --width, --val-fraction, --seed, --amp, ...). All methods have one linear
head over all classes and train it by cross-entropy (iCaRL: binary cross-entropy) with plain SGD on one
view an image: padded by an eighth, cropped, flipped. All tasks get --epochs: a reservoir that is
offered every image of every epoch would otherwise be full of the first one. results.json has the
method's own classifier as "head" beside our readouts of its encoder ("linear" with its stored
images, "image_free"). Imports our modules, is imported by none.
"""

import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import eval as evaluation
import train
from data import Problem, normalise, of_classes, save, write
from model import Encoder, frozen_copy

# Rates and weights of the published runs at buffer 200 and batch 32.
METHODS = {"er": dict(lr=0.1), "der": dict(lr=0.03, alpha=0.3),
           "derpp": dict(lr=0.03, alpha=0.1, beta=0.5), "icarl": dict(lr=0.1),
           "gem": dict(lr=0.03, margin=0.5), "gss": dict(lr=0.03)}


class Memory:
    """A reservoir of rows that belong together (images, labels, logits), offered batch by batch."""

    def __init__(self, capacity, generator):
        self.capacity, self.generator, self.seen, self.rows = capacity, generator, 0, None

    def __len__(self):
        return 0 if self.rows is None else len(self.rows[0])

    def put(self, slot, row):
        """Write `row` to `slot`; a slot behind the last is a new one."""
        if self.rows is None:
            self.rows = [part[None].clone() for part in row]
        elif slot == len(self):
            self.rows = [torch.cat([held, part[None]]) for held, part in zip(self.rows, row)]
        else:
            for held, part in zip(self.rows, row):
                held[slot] = part

    def add(self, *rows):
        """The i-th row ever seen goes to a slot drawn from 0..i; it is kept if that slot exists."""
        for row in zip(*rows):
            slot = self.seen if self.seen < self.capacity else int(
                torch.randint(self.seen + 1, (1,), generator=self.generator))
            self.seen += 1
            if slot < self.capacity:
                self.put(slot, row)

    def draw(self, count):
        """min(count, size) rows without replacement."""
        some = torch.randperm(len(self), generator=self.generator)[:count]
        return [held[some] for held in self.rows]


class Classifier(nn.Module):
    """Our encoder's features and a linear head over all classes."""

    def __init__(self, c, classes):
        super().__init__()
        self.encoder, self.head = Encoder(c.width, c.dim), nn.Linear(8 * c.width, classes)

    def forward(self, x):
        return self.head(self.encoder.features(x))


def crop_flip(images, generator, mean, std):
    """One view: pad by an eighth with black, crop at random, flip; (B, 3, S, S) uint8 -> float."""
    B, _, _, S = images.shape
    pad = S // 8
    padded = F.pad(images, (pad, pad, pad, pad))
    top, left, flip = (torch.randint(high, (B, 1), generator=generator)
                       for high in (2 * pad + 1, 2 * pad + 1, 2))
    pixel = torch.arange(S)
    rows, columns = top + pixel, left + torch.where(flip == 1, S - 1 - pixel, pixel)    # (B, S)
    index = (torch.arange(B)[:, None, None], slice(None), rows[:, :, None], columns[:, None, :])
    return normalise(padded[index].permute(0, 3, 1, 2), mean, std)      # (B, S, S, 3) before


class Learner:
    """What the methods share. Each has a `step`: it trains on a batch and returns the loss."""

    def __init__(self, c, m, data, device):
        torch.manual_seed(train.seed_for(c.seed, "weights"))
        self.c, self.m, self.data, self.device = c, m, data, device
        self.classes = len(data.names)
        self.net = Classifier(c, self.classes).to(device, memory_format=torch.channels_last)
        self.generator = torch.Generator().manual_seed(train.seed_for(c.seed, "baseline"))
        self.memory = Memory(c.buffer, self.generator)
        self.parameters = {name: p for name, p in self.net.named_parameters()
                           if "projector" not in name}      # the head reads features
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=m.lr)
        self.colours = {key: data.recipe[key] for key in ("mean", "std")}
        self.old = 0                                        # classes of earlier tasks

    def view(self, images):
        return crop_flip(images, self.generator, **self.colours)

    def logits(self, x, net=None):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.c.amp):
            return (net or self.net)(x).float()

    def update(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def pool(self, images, labels):
        """What an epoch goes through, given all images of the task."""
        return images, labels

    def finish(self, images, labels):
        """Called with all images of the task that ends."""

    def scores(self, images):
        """(n, classes) for test images: the method's own classifier."""
        return self.each(images, self.net)                  # in float32, as our readouts

    @torch.no_grad()
    def each(self, images, function):
        """`function` of unaugmented images, 500 at a time, BatchNorm by running statistics."""
        self.net.eval()
        parts = [function(normalise(part, **self.colours)) for part in images.split(500)]
        self.net.train()
        return torch.cat(parts)


class ER(Learner):
    """Batch and replayed batch in one forward pass."""

    def step(self, images, labels):
        x, y = images, labels
        if len(self.memory):
            old_images, old_labels = self.memory.draw(self.c.batch_size)[:2]
            x, y = torch.cat([images, old_images]), torch.cat([labels, old_labels])
        loss = self.update(F.cross_entropy(self.logits(self.view(x)), y))
        self.remember(images, labels)
        return loss

    def remember(self, images, labels):
        self.memory.add(images, labels)


class DER(Learner):
    """Replayed images keep the logits of their view when they came; DER++ adds their labels."""

    def step(self, images, labels):
        out = self.logits(self.view(images))
        loss = F.cross_entropy(out, labels)
        if len(self.memory):
            old_images, _, old_logits = self.memory.draw(self.c.batch_size)
            loss = loss + self.m.alpha * F.mse_loss(self.logits(self.view(old_images)), old_logits)
            if self.m.method == "derpp":
                old_images, old_labels, _ = self.memory.draw(self.c.batch_size)
                again = F.cross_entropy(self.logits(self.view(old_images)), old_labels)
                loss = loss + self.m.beta * again
        self.memory.add(images, labels, out.detach())
        return self.update(loss)


class ICaRL(Learner):
    """Binary cross-entropy against one-hot new and distilled old classes; nearest exemplar mean."""

    teacher, exemplars = None, ()                           # exemplars: (m, 3, S, S) of each class

    def pool(self, images, labels):
        owners = [labels.new_full((len(e),), k) for k, e in enumerate(self.exemplars)]
        return torch.cat([images, *self.exemplars]), torch.cat([labels, *owners])

    def step(self, images, labels):
        x = self.view(images)
        seen = self.old + self.per_task
        target = F.one_hot(labels, self.classes)[:, :seen].float()
        if self.teacher is not None:
            with torch.no_grad():
                target[:, :self.old] = self.logits(x, self.teacher)[:, :self.old].sigmoid()
        loss = F.binary_cross_entropy_with_logits(self.logits(x)[:, :seen], target)
        return self.update(loss + 1e-5 * sum(p.square().sum() for p in self.parameters.values()))

    def features(self, images):
        return F.normalize(self.each(images, lambda x: self.net.encoder.features(x)), dim=1)

    def finish(self, images, labels):
        """Herding: the exemplars whose mean stays nearest to the class mean, one after another."""
        seen = self.old + self.per_task
        m = self.c.buffer // seen
        kept = [e[:m] for e in self.exemplars]
        for k in range(self.old, seen):
            mine = images[labels == k]
            h = self.features(mine)
            mean, total, chosen = h.mean(0), torch.zeros_like(h[0]), []
            for n in range(1, min(m, len(mine)) + 1):
                distance = (mean - (total + h) / n).norm(dim=1)
                distance[chosen] = torch.inf
                chosen.append(int(distance.argmin()))
                total = total + h[chosen[-1]]
            kept.append(mine[chosen])
        self.exemplars = kept
        self.memory.rows = [torch.cat(kept), torch.cat(
            [labels.new_full((len(e),), k) for k, e in enumerate(kept)])]
        self.teacher = frozen_copy(self.net).eval()         # here by running statistics

    def scores(self, images):
        means = F.normalize(torch.stack([self.features(e).mean(0) for e in self.exemplars]), dim=1)
        s = means.new_full((len(images), self.classes), -torch.inf)
        s[:, :len(means)] = -torch.cdist(self.features(images), means)
        return s


def gem_project(g, G, margin):
    """GEM's quadratic programme: g + G^T v, v minimising v A v / 2 + (G g) v over v >= margin.

    At most a few constraints: try every set of them that is active and take the one that satisfies
    the optimality conditions.
    """
    G, g, device = G.cpu(), g.cpu(), g.device
    A, b = (G @ G.T + 1e-3 * torch.eye(len(G))).double(), (G @ g).double()
    best, best_value = None, torch.inf
    for active in itertools.product([False, True], repeat=len(G)):
        active = torch.tensor(active)
        v = torch.full_like(b, margin)
        if (~active).any():
            rest = b[~active] + A[~active][:, active] @ v[active]
            v[~active] = torch.linalg.solve(A[~active][:, ~active], -rest)
        value = v @ A @ v / 2 + b @ v
        if (v >= margin - 1e-9).all() and value < best_value:
            best, best_value = v, value
    return (g + G.T @ best.float()).to(device)


class GEM(Learner):
    """The gradient may not raise the loss on the memory of any earlier task."""

    tasks = ()                                              # (images, labels) kept of each task

    def gradient(self, images, labels):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.logits(self.view(images)), labels)
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in self.parameters.values()])

    def step(self, images, labels):
        G = [self.gradient(*kept)[1] for kept in self.tasks]
        loss, g = self.gradient(images, labels)
        if G and (torch.stack(G) @ g < 0).any():
            g = gem_project(g, torch.stack(G), self.m.margin)
            parts = g.split([p.numel() for p in self.parameters.values()])
            for p, part in zip(self.parameters.values(), parts):
                p.grad.copy_(part.view(p.shape))
        self.optimizer.step()
        return loss

    def finish(self, images, labels):
        n = self.c.buffer // len(self.data.tasks)
        some = torch.randperm(len(labels), generator=self.generator)[:n]
        self.tasks = [*self.tasks, (images[some], labels[some])]
        self.memory.rows = [torch.cat(parts) for parts in zip(*self.tasks)]


class GSS(ER):
    """ER whose memory prefers images with gradients unlike those that are stored (greedy).

    A score is 1 + the largest cosine with the gradients of a few stored images. A full memory lets
    a batch in if its mean gradient scores below 1, image by image: a slot is drawn by the stored
    scores s and replaced with probability s / (s + the image's own score).
    """

    def gradients(self, images, labels):
        """One for each plain image, BatchNorm by running statistics: (n, P)."""
        def loss(parameters, x, y):
            out = torch.func.functional_call(self.net, parameters, (x[None],))
            return F.cross_entropy(out, y[None])

        self.net.eval()
        parts = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(
            {name: p.detach() for name, p in self.parameters.items()},
            normalise(images, **self.colours), labels)
        self.net.train()
        return torch.cat([part.flatten(1) for part in parts.values()], 1)

    def remember(self, images, labels):
        score, singles = torch.tensor(0.1), torch.full((len(labels),), 0.1)
        if len(self.memory):
            g = self.gradients(images, labels)
            stored = self.gradients(*self.memory.draw(self.c.batch_size)[:2])
            score, *singles = 1 + (F.normalize(torch.cat([g.mean(0, keepdim=True), g]), dim=1)
                                   @ F.normalize(stored, dim=1).T).amax(1).cpu()
        for image, label, single in zip(images, labels, singles):
            if len(self.memory) < self.memory.capacity:
                self.memory.put(len(self.memory), (image, label, score))
            elif score < 1:
                held = self.memory.rows[2]
                slot = int(torch.multinomial(held + 1e-6, 1, generator=self.generator))
                replaced = held[slot] / (held[slot] + single + 1e-12)
                if torch.rand(1, generator=self.generator) < replaced:
                    self.memory.put(slot, (image, label, single))


LEARNERS = {"er": ER, "der": DER, "derpp": DER, "icarl": ICaRL, "gem": GEM, "gss": GSS}


def run(c, m, data, device, out):
    """All tasks; after each one the method's own scores and a task<t>.pt that eval.py can read."""
    learner = LEARNERS[m.method](c, m, data, device)
    rows, log = {kind: [] for kind in evaluation.KINDS}, open(out / "log.jsonl", "w")
    split = ((data.val_images, data.val_labels) if c.val_fraction
             else (data.test_images, data.test_labels))
    for t, classes in enumerate(data.tasks, 1):
        mine = of_classes(data.train_labels, classes)
        images, labels = data.train_images[mine], data.train_labels[mine]
        learner.old, learner.per_task = classes[0], len(classes)
        pool_images, pool_labels = learner.pool(images, labels)
        size = min(c.batch_size, len(pool_labels))
        for epoch in range(1, c.epochs + 1):
            start, losses = time.perf_counter(), []
            order = torch.randperm(len(pool_labels), generator=learner.generator)
            for batch in order[:len(order) // size * size].split(size):
                losses.append(learner.step(pool_images[batch], pool_labels[batch]))
            loss = torch.stack(losses).mean().item()
            entry = {"task": t, "epoch": epoch, "loss": loss,
                     "seconds": time.perf_counter() - start}
            log.write(json.dumps(entry) + "\n")
            log.flush()
            print(f"task {t} epoch {epoch}/{c.epochs} loss {loss:.4f} {entry['seconds']:.0f} s",
                  flush=True)
            if not math.isfinite(loss):
                raise Problem(f"the loss is not finite in task {t}, epoch {epoch}: start a new run "
                              f"with a smaller --lr than {m.lr}")
        kept, y = (learner.memory.rows or (data.train_images[:0], data.train_labels[:0]))[:2]
        old = y < classes[0]                                # D13: images of tasks before t
        learner.finish(images, labels)
        seen = split[1] < classes[-1] + 1
        scores = learner.scores(split[0][seen])[:, :classes[-1] + 1]
        for kind, row in zip(rows, evaluation.accuracies(scores, split[1][seen], data.tasks[:t])):
            rows[kind].append(row)
        print(f"task {t}: Class-IL {sum(rows['class_il'][-1]) / t:.1f}, Task-IL "
              f"{sum(rows['task_il'][-1]) / t:.1f} by the method's own classifier", flush=True)
        save(out / f"task{t}.pt", {
            "settings": vars(c), "task": t, "epoch": c.epochs, "predictor": None, "optimizer": None,
            "generator": None, "net": learner.net.encoder.state_dict(),
            "head": learner.net.head.state_dict(),
            "prototypes": torch.zeros(learner.classes, c.dim),
            "buffer": {"images": kept[old], "labels": y[old]}})
    return {kind: evaluation.summary(rows[kind]) for kind in rows}


def main(argv):
    """Train a method, then evaluate its encoder as we evaluate ours."""
    parser = argparse.ArgumentParser(prog="baselines.py", description=__doc__.split("\n")[0],
                                     usage="python results/baselines.py --method M [train's flags]")
    parser.add_argument("--method", choices=list(METHODS), required=True)
    for name in ("alpha", "beta", "margin"):
        parser.add_argument(f"--{name}", type=train.number(float, 0, 1000), help="of the method")
    m, flags = parser.parse_known_args(argv)
    for key, value in METHODS[m.method].items():
        if getattr(m, key, None) is None:
            setattr(m, key, value)
    c = train.parse(["--batch-size", "32", "--lr", str(m.lr), *flags])
    folder = f"{c.dataset}-buffer{c.buffer}-seed{c.seed}"
    if c.out == f"runs/{folder}":
        c.out = f"runs/{m.method}-{folder}"
    m.lr, c.plasticity, c.stability, c.epochs_first = c.lr, m.method, "none", c.epochs
    if c.init or c.resume:
        raise Problem("--init and --resume are train.py's: a baseline starts anew")
    if c.buffer == 0:
        raise Problem(f"--method {m.method} replays stored images: give --buffer 200, say")
    device, out = train.pick_device(c.device), Path(c.out)
    data = train.load_data(c, device)
    c.classes = data.names
    if (out / "config.json").exists():
        raise Problem(f"{out} holds a run already: choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write(out / "config.json", json.dumps({"settings": vars(c), "method": vars(m)}).encode())
    head = run(c, m, data, device, out)
    write(out / "head.json", json.dumps(head).encode())     # eval.py alone cannot make it again
    name = "val" if c.val_fraction else "test"
    results = {"head": head} | evaluation.evaluate(out, split=name, device=device)
    del results["prototype"]                                # there are none, and the projector of
    results["nc"] = dict.fromkeys(results["nc"])            # neural collapse is not trained
    path = out / ("results.json" if name == "test" else "results-val.json")
    write(path, json.dumps(results | {"method": vars(m)}, indent=1).encode())
    evaluation.print_results(out, results)
    print(f"own classifier, AA: Class-IL {head['class_il']['aa']:.1f}, Task-IL "
          f"{head['task_il']['aa']:.1f}; written to {path}")


if __name__ == "__main__":
    train.command(main)
