"""The other methods of the paper's Table 2, and DER++, on our network, data, tasks and metrics.

    python results/baselines.py --method er --dataset cifar10 --buffer 200 --epochs 45 --out RUN

Rehearsal: er, der, derpp, icarl, gem, gss, gcr, with train.py's flags for data and running. One
linear head over all classes, plain SGD, one view an image: padded by an eighth, cropped, flipped.
All tasks get --epochs, because the reservoir is offered every image in every epoch. results.json
has the method's own classifier as "head". cila is Co2L by train.py, with all its flags.
"""

import argparse
import functools
import itertools
import json
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
import eval as evaluation
import train
from data import normalise, refuse, save, task_images, write
from model import Encoder, frozen_copy


class Memory:
    """A reservoir of rows that belong together (image, label, logits, ...), offered by batches."""

    def __init__(self, capacity, generator):
        self.capacity, self.generator, self.seen, self.rows = capacity, generator, 0, []

    def put(self, slot, row):                               # the slot behind the last is a new one
        self.rows[slot:slot + 1] = [[part.clone() for part in row]]

    def add(self, *batch):
        """The i-th row ever seen goes to a slot drawn from 0..i; it is kept if that slot exists."""
        for row in zip(*batch):
            slot = self.seen if self.seen < self.capacity else int(
                torch.randint(self.seen + 1, (1,), generator=self.generator))
            self.seen += 1
            if slot < self.capacity:
                self.put(slot, row)

    def draw(self, count):
        """min(count, size) rows without replacement, as columns; nothing if there are none."""
        some = torch.randperm(len(self.rows), generator=self.generator)[:count]
        return columns(self.rows[i] for i in some)


def columns(rows):
    return [torch.stack(parts) for parts in zip(*rows)]


class Classifier(Encoder):
    """Our encoder with a linear head over all classes on its features."""

    def __init__(self, c, classes):
        super().__init__(c.width, c.dim)
        self.head = torch.nn.Linear(8 * c.width, classes)

    def forward(self, x):
        return self.head(self.features(x))


def crop_flip(images, generator, mean, std):
    """One view: pad by an eighth with black, crop at random, flip; (B, 3, S, S) uint8 -> float."""
    (B, _, _, S), device = images.shape, images.device
    pad, pixel = S // 8, torch.arange(S, device=device)
    top, left, flip = (torch.randint(high, (B, 1), generator=generator).to(device)
                       for high in (2 * pad + 1, 2 * pad + 1, 2))
    rows, across = top + pixel, left + torch.where(flip == 1, S - 1 - pixel, pixel)     # (B, S)
    view = F.pad(images, (pad, pad, pad, pad))[torch.arange(B, device=device)[:, None, None], :,
                                               rows[:, :, None], across[:, None, :]]
    return normalise(view.permute(0, 3, 1, 2), mean, std)               # (B, S, S, 3) before


class Learner:
    """What the methods share. Each has a `step`: it trains on a batch and returns the loss."""

    def __init__(self, c, m, data, device):
        torch.manual_seed(train.seed_for(c.seed, "weights"))
        self.c, self.m, self.data, self.device = c, m, data, device     # m: the method's settings
        self.classes = len(data.names)
        self.net = Classifier(c, self.classes).to(device, memory_format=torch.channels_last)
        self.generator = torch.Generator().manual_seed(train.seed_for(c.seed, "baseline"))
        self.memory = Memory(c.buffer, self.generator)
        self.parameters = {name: p for name, p in self.net.named_parameters()
                           if "projector" not in name}      # the head reads features
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=m["lr"])
        self.colours = {key: data.recipe[key] for key in ("mean", "std")}
        self.view = functools.partial(crop_flip, generator=self.generator, **self.colours)
        self.old, self.seen = 0, len(data.tasks[0])         # classes before this task; and with it

    def logits(self, x, net=None):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.c.amp):
            return (net or self.net)(x).float()

    def update(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def remember(self, *batch):
        self.memory.add(*batch)

    def pool(self, images, labels):
        """What an epoch goes through, given all images of the task."""
        return images, labels

    def finish(self, images, labels):
        """Called with all images of the task that ends."""

    def each(self, images, function):
        """`function` of plain images, BatchNorm by running statistics."""
        self.net.eval()
        found = evaluation.encode(function, images, lambda x: normalise(x, **self.colours))
        self.net.train()
        return found

    def scores(self, images):
        """(n, classes) by the method's own classifier, in float32."""
        return self.each(images, self.net)


class ER(Learner):
    """Batch and replayed batch in one forward pass."""

    def step(self, images, labels):
        x, y = images, labels
        if drawn := self.memory.draw(self.c.batch_size):
            x, y = torch.cat([images, drawn[0]]), torch.cat([labels, drawn[1]])
        loss = self.update(F.cross_entropy(self.logits(self.view(x)), y))
        self.remember(images, labels)
        return loss


class DER(Learner):
    """Replayed images keep the logits of their view when they came; DER++ adds their labels."""

    def draw(self):
        return self.memory.draw(self.c.batch_size)

    def step(self, images, labels):
        out = self.logits(self.view(images))
        loss = F.cross_entropy(out, labels)
        if drawn := self.draw():
            x, _, logits, w = drawn
            error = (self.logits(self.view(x)) - logits).square().mean(1)
            loss = loss + self.m["alpha"] * (w * error).sum() / w.sum()
            if "beta" in self.m:                            # a second, independent draw
                x, y, _, w = self.draw()
                error = F.cross_entropy(self.logits(self.view(x)), y, reduction="none")
                loss = loss + self.m["beta"] * (w * error).sum() / w.sum()
        self.remember(images, labels, out.detach(), torch.ones(len(labels), device=out.device))
        return self.update(loss)


def matching_pursuit(g, count, ridge=0.5):
    """At most `count` weights > 0 of (n,), the rest 0, so that weights @ g is near g.sum(0): take
    the row of g (n, P) with the largest projection of what is left, solve for all weights by ridge
    regression, drop the most negative one and solve again until none is."""
    target, chosen, weights = g.sum(0), [], g.new_zeros(0)
    for _ in range(min(count, len(g))):
        projections = g @ (target - weights @ g[chosen])
        projections[chosen] = -torch.inf
        chosen = [*chosen, int(projections.argmax())]
        while True:
            A = g[chosen]
            gram = A @ A.T + ridge * torch.eye(len(A), dtype=g.dtype, device=g.device)
            weights = torch.linalg.solve(gram, A @ target)
            if (weights >= 0).all():
                break
            chosen.pop(int(weights.argmin()))
    found = g.new_zeros(len(g))
    found[chosen] = weights
    return found


class GCR(DER):
    """DER++ on a coreset: few stored images, with weights, whose gradient is that of many.

    While task t runs, a reservoir of its correctly classified images (weight 1) stands beside the
    coreset. At its end each of the t tasks, from its own images, gets buffer // (t+1) slots by
    matching pursuit of last-layer gradients, and the next reservoir the rest: never more than the
    buffer is held. (The published code has a reservoir besides, so it chooses from more: here the
    slots of new tasks / their candidates are 100 / 200, 66 / 100, 50 / 68, ...) Our choices: plain
    images and running statistics for the gradients; an image chosen again gets the product of its
    weights, so that weighted gradients still add up.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.reservoir, self.offered = self.memory, 0
        self.memory = Memory(0, self.generator)             # the coreset

    def remember(self, *batch):
        right = (batch[2].argmax(1) == batch[1]) | (self.c.epochs == 1)
        self.reservoir.add(*(part[right] for part in batch))

    def draw(self):
        """From the reservoir in proportion to what it was offered, the rest from the coreset."""
        size, new = self.c.batch_size, self.reservoir.seen
        n = min(len(self.reservoir.rows), size * new // max(1, self.offered + new))
        parts = filter(None, [self.reservoir.draw(n), self.memory.draw(size - n)])
        drawn = [torch.cat(column) for column in zip(*parts)]
        return drawn if drawn and len(drawn[1]) > 1 else []     # BatchNorm needs two

    def choose(self, rows, slots):
        """The `slots` rows whose weighted last-layer gradients add up to those of all rows."""
        images, labels, logits, w = columns(rows)
        h = self.each(images, self.net.features)                                # (n, F)
        out = self.net.head(h).detach()                                         # (n, C)
        g = self.m["beta"] * (out.softmax(1) - F.one_hot(labels, self.classes))
        g = w[:, None] * (g + self.m["alpha"] * 2 / self.classes * (out - logits))
        g = torch.cat([g, (g[:, :, None] * h[:, None]).flatten(1)], 1)          # (n, C + C F)
        g, labels = g.cpu().double(), labels.cpu()
        weights = g.new_zeros(len(g))
        for k in labels.unique():
            of_class = labels == k
            share = max(1, slots * int(of_class.sum()) // len(labels))
            weights[of_class] = matching_pursuit(g[of_class], share)
        empty = (weights == 0).nonzero().squeeze(1).cpu()   # a shortfall: random ones of weight 1
        mixed = empty[torch.randperm(len(empty), generator=self.generator)]
        weights[mixed[:max(0, slots + len(empty) - len(weights))]] = 1
        return [[*rows[i][:3], w[i] * weights[i].float()]
                for i in weights.topk(min(slots, len(g))).indices]

    def finish(self, images, labels):
        rows, block = self.memory.rows + self.reservoir.rows, len(self.data.tasks[0])
        slices = [[row for row in rows if row[1] // block == t] for t in range(self.seen // block)]
        slots = self.c.buffer // (len(slices) + 1)
        self.memory.rows = sum((self.choose(rows, slots) for rows in slices if rows), [])
        self.offered += self.reservoir.seen
        self.reservoir = Memory(self.c.buffer - len(self.memory.rows), self.generator)


class ICaRL(Learner):
    """Binary cross-entropy against one-hot new and distilled old classes; nearest exemplar mean."""

    teacher, exemplars = None, ()                           # exemplars: (m, 3, S, S) of each class

    def pool(self, images, labels):
        owners = [labels.new_full((len(e),), k) for k, e in enumerate(self.exemplars)]
        return torch.cat([images, *self.exemplars]), torch.cat([labels, *owners])

    def step(self, images, labels):
        x = self.view(images)
        target = F.one_hot(labels, self.classes)[:, :self.seen].float()
        if self.teacher is not None:
            with torch.no_grad():
                target[:, :self.old] = self.logits(x, self.teacher)[:, :self.old].sigmoid()
        loss = F.binary_cross_entropy_with_logits(self.logits(x)[:, :self.seen], target)
        return self.update(loss + 1e-5 * sum(p.square().sum() for p in self.parameters.values()))

    def features(self, images):
        return F.normalize(self.each(images, self.net.features), dim=1)

    def finish(self, images, labels):
        """Herding: the exemplars whose mean stays nearest to the class mean, one after another."""
        m = self.c.buffer // self.seen
        self.exemplars = [e[:m] for e in self.exemplars]
        for k in range(self.old, self.seen):
            of_class = images[labels == k]
            h, chosen = self.features(of_class), []
            for n in range(1, min(m, len(h)) + 1):
                distance = (h.mean(0) - (h[chosen].sum(0) + h) / n).norm(dim=1)
                distance[chosen] = torch.inf
                chosen.append(int(distance.argmin()))
            self.exemplars.append(of_class[chosen])
        self.memory.rows = list(zip(*self.pool(images[:0], labels[:0])))
        self.teacher = frozen_copy(self.net).eval()         # here by running statistics

    def scores(self, images):
        means = F.normalize(torch.stack([self.features(e).mean(0) for e in self.exemplars]), dim=1)
        return -torch.cdist(self.features(images), means)


def gem_project(g, G, margin):
    """GEM's quadratic programme: g + G^T v, v minimising v A v / 2 + (G g) v over v >= margin; by
    trying every set of active constraints, as they are few."""
    A, b = G @ G.T + 1e-3 * torch.eye(len(G), device=G.device), G @ g
    A, b, found = A.cpu().double(), b.cpu().double(), []
    for free in itertools.product([False, True], repeat=len(G)):
        free, v = torch.tensor(free), torch.full_like(b, margin)
        v[free] = torch.linalg.solve(A[free][:, free], -b[free] - A[free][:, ~free] @ v[~free])
        if (v >= margin - 1e-9).all():
            found.append(((v @ A @ v / 2 + b @ v).item(), v))
    return g + G.T @ min(found, key=lambda pair: pair[0])[1].to(g)


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
            g = gem_project(g, torch.stack(G), self.m["margin"])
            parts = g.split([p.numel() for p in self.parameters.values()])
            for p, part in zip(self.parameters.values(), parts):
                p.grad.copy_(part.view(p.shape))
        self.optimizer.step()
        return loss

    def finish(self, images, labels):
        n = self.c.buffer // len(self.data.tasks)
        some = torch.randperm(len(labels), generator=self.generator)[:n].to(labels.device)
        self.tasks = [*self.tasks, (images[some], labels[some])]
        self.memory.rows = [row for kept in self.tasks for row in zip(*kept)]


class GSS(ER):
    """ER whose memory prefers images with gradients unlike those that are stored (greedy).

    Score: 1 + the largest cosine with gradients of a few stored images. A full memory lets a batch
    in if its mean gradient scores below 1: for each image a slot is drawn by the stored scores s
    and replaced with probability s / (s + the image's own score)."""

    def gradients(self, images, labels):
        """One for each plain image, BatchNorm by running statistics: (n, P)."""
        loss = lambda parameters, x, y: F.cross_entropy(
            torch.func.functional_call(self.net, parameters, (x[None],)), y[None])
        self.net.eval()
        parts = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(
            {name: p.detach() for name, p in self.parameters.items()},
            normalise(images, **self.colours), labels)
        self.net.train()
        return torch.cat([part.flatten(1) for part in parts.values()], 1)

    def remember(self, images, labels):
        score, singles = torch.tensor(0.1), torch.full((len(labels),), 0.1)
        if drawn := self.memory.draw(self.c.batch_size):
            g, stored = self.gradients(images, labels), self.gradients(*drawn[:2])
            score, *singles = 1 + (F.normalize(torch.cat([g.mean(0, keepdim=True), g]), dim=1)
                                   @ F.normalize(stored, dim=1).T).amax(1).cpu()
        for image, label, single in zip(images, labels, singles):
            if len(self.memory.rows) < self.memory.capacity:
                self.memory.put(len(self.memory.rows), (image, label, score))
            elif score < 1:
                held = torch.stack([row[2] for row in self.memory.rows])
                slot = int(torch.multinomial(held + 1e-6, 1, generator=self.generator))
                replaced = held[slot] / (held[slot] + single + 1e-12)
                if torch.rand(1, generator=self.generator) < replaced:
                    self.memory.put(slot, (image, label, single))


# Rates and weights of the published runs (GCR: of its code) at buffer 200 and batch 32. CILA has no
# published kappa; 1.5 is not tuned: in our runs of Co2L the ratio of sums is 0.75 to 0.89, so that
# kappa 1 would be Co2L.
METHODS = {"er": (ER, dict(lr=0.1)), "der": (DER, dict(lr=0.03, alpha=0.3)),
           "derpp": (DER, dict(lr=0.03, alpha=0.1, beta=0.5)), "icarl": (ICaRL, dict(lr=0.1)),
           "gem": (GEM, dict(lr=0.03, margin=0.5)), "gss": (GSS, dict(lr=0.03)),
           "gcr": (GCR, dict(lr=0.03, alpha=0.1, beta=0.5)), "cila": (None, dict(kappa=1.5))}


def run(c, m, data, device, out):
    """All tasks; after each one the method's own scores and a task<t>.pt that eval.py can read."""
    learner, log, rows = METHODS[m["method"]][0](c, m, data, device), [], ([], [])
    test_images, test_labels = data[4:6] if c.val_fraction else data[2:4]
    for t, classes in enumerate(data.tasks, 1):
        images, labels = task_images(data, t)
        learner.old, learner.seen = classes[0], classes[-1] + 1
        pool = learner.pool(images, labels)
        size = min(c.batch_size, len(pool[1]))
        for epoch in range(1, c.epochs + 1):
            start = time.perf_counter()
            order = torch.randperm(len(pool[1]), generator=learner.generator).to(device)
            losses = [learner.step(*(part[batch] for part in pool))
                      for batch in order[:len(order) // size * size].split(size)]
            log.append({"task": t, "epoch": epoch, "loss": torch.stack(losses).mean().item(),
                        "seconds": time.perf_counter() - start})
            write(out / "log.jsonl", "".join(json.dumps(e) + "\n" for e in log).encode())
            print(log[-1], flush=True)
            refuse(not log[-1]["loss"] < torch.inf, f"the loss is not finite in task {t}, epoch "
                   f"{epoch}: start a new run with a smaller --lr than {c.lr}")
        old = [row[:2] for row in learner.memory.rows if row[1] < classes[0]]   # D13: before task t
        learner.finish(images, labels)
        shown = test_labels < learner.seen
        scores = learner.scores(test_images[shown])[:, :learner.seen]
        found = evaluation.accuracies(scores, test_labels[shown], data.tasks[:t])
        rows = [[*past, row] for past, row in zip(rows, found)]
        save(out / f"task{t}.pt", {
            "net": {k: v for k, v in learner.net.state_dict().items() if not k.startswith("head.")},
            "prototypes": torch.zeros(len(data.names), c.dim, device=device),
            "buffer": dict(zip(("images", "labels"), columns(old) or (images[:0], labels[:0])))})
    return dict(zip(evaluation.KINDS, map(evaluation.summary, rows)))


def cila(flags, out, kappa):
    """Co2L by train.py with IRD weighted by lambda_t in task t; returns lambda_2, lambda_3, ...

    lambda_t = max(1, kappa * sum of IRD / sum of SupCon over tasks 2..t-1), losses without weights
    as in log.jsonl. train.train continues from the last checkpoint: it is called task by task.
    """
    def weight(t):
        lines = (out / "log.jsonl").read_text().splitlines() if t > 2 else []
        past = [e for e in map(json.loads, lines) if 1 < e["task"] < t]
        ird, supcon = (sum(e[key] for e in past) for key in ("stability", "plasticity"))
        return max(1.0, kappa * ird / supcon) if past else 1.0

    def task_by_task(c, data, device, out, all_tasks=train.train):
        for t in range(1, c.tasks + 1):
            print(f"task {t}: lambda {weight(t):.4f}", flush=True)
            all_tasks(argparse.Namespace(**vars(c) | {
                "tasks": t, "stability_weight": weight(t) * c.stability_weight}), data, device, out)

    with mock.patch.object(train, "train", task_by_task):
        train.main([*flags, "--plasticity", "supcon", "--stability", "ird"])
    return [weight(t) for t in range(2, train.open_run(out)[0].tasks + 1)]


def main(argv):
    """Train a method, then evaluate its encoder as we evaluate ours."""
    parser = argparse.ArgumentParser(prog="baselines.py", epilog="All other flags are train.py's.")
    parser.add_argument("--method", choices=list(METHODS), required=True)
    for name in ("alpha", "beta", "margin", "kappa"):
        parser.add_argument(f"--{name}", type=float, help="of the method")
    args, flags = parser.parse_known_args(argv)
    method, head = args.method, {}
    m = METHODS[method][1] | {k: v for k, v in vars(args).items() if v is not None}
    c = train.parse(["--batch-size", "32", "--lr", str(m["lr"]), *flags] if "lr" in m else flags)
    device, out = train.pick_device(c.device), Path(c.out)
    if method == "cila":
        m["lambda"] = cila(flags, out, m["kappa"])
    else:
        refuse(c.init or c.resume, "--init and --resume are for train.py and cila")
        refuse(c.tasks == 1, "--tasks 1 is joint training, which train.py does")
        refuse((out / "config.json").exists(), f"{out} holds a run: choose another --out")
        data = train.load_data(c, device)
        refuse(c.buffer < len(data.names), f"--method {method} keeps images of each of the "
               f"{len(data.names)} classes, --buffer {c.buffer} is too small: give --buffer 200")
        c.classes, c.recipe, c.plasticity, c.stability = data.names, data.recipe, method, "none"
        m["lr"], c.epochs_first = c.lr, c.epochs
        out.mkdir(parents=True, exist_ok=True)
        write(out / "config.json", json.dumps({"settings": vars(c), "method": m}).encode())
        head = {"head": run(c, m, data, device, out)}
        write(out / "head.json", json.dumps(head["head"]).encode())     # eval.py cannot make it
    split, name = ("val", "results-val.json") if c.val_fraction else ("test", "results.json")
    results = head | evaluation.evaluate(out, split=split, device=device) | {"method": m}
    if head:                                                # there are no prototypes, and the
        del results["prototype"], results["nc"]             # projector is not trained
        print("own classifier, AA: Class-IL {:.1f}, Task-IL {:.1f}".format(
            *(head["head"][kind]["aa"] for kind in evaluation.KINDS)))
    write(out / name, json.dumps(results, indent=1).encode())
    evaluation.print_summary({out: results})


if __name__ == "__main__":
    train.command(main)
