"""Stage 1: learn tasks one after the other with L = w L_FNC2 + v L_HSD (Eq. 6, where w = v = 1).

    python train.py                                  # drawn shapes, minutes on a laptop, no files
    python train.py --dataset cifar10 --buffer 0     # the paper's headline run (a GPU and hours)
    python train.py --dataset cifar10 --plasticity supcon --stability ird      # Co2L
    torchrun --nproc-per-node 4 train.py ...         # the same run on four GPUs

What the flags leave unset is filled by the dataset's preset below; w is --plasticity-weight (D9 in
the README), v --stability-weight. A run folder holds config.json (settings), log.jsonl (a line per
epoch), task<t>.pt (the state at the end of task t) and last.pt (the same inside a task, for
--resume). `python eval.py RUN` evaluates it.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from buffer import ReservoirBuffer
from data import DATASETS, Problem, augment, load, of_classes, read, save, split_tasks, write
from etf import simplex_etf
from losses import fnc2_loss, hsd_alpha, hsd_loss, supcon_loss
from model import Encoder, Predictor, frozen_copy

# The values of the paper's appendix; width 64 is ResNet-18. `folder` takes cifar100's, `shapes` is
# ours, chosen on validation images.
PAPER = dict(epochs_first=500, epochs=100, batch_size=512, lr=0.5, dim=128, width=64, gamma=1.0,
             tau=0.5, e0=30, kappa_past=0.01, kappa_current=0.2, zeta_past=0.01, zeta_current=0.2)
PRESETS = {
    "cifar10": PAPER,
    "cifar100": PAPER | dict(gamma=4.0, zeta_past=0.1),
    "tinyimagenet": PAPER | dict(epochs=50, lr=0.1, dim=256, gamma=4.0, e0=20,
                                 kappa_past=0.1, kappa_current=0.1, zeta_past=0.1),
    "folder": PAPER | dict(gamma=4.0, zeta_past=0.1),
    "shapes": PAPER | dict(epochs_first=50, epochs=20, batch_size=32, lr=0.01, dim=32, width=8,
                           e0=6, image_size=16),
}


# ------------------------------------------------------------------------ training
# `c` is the settings of a run: a namespace of the flags in `build_parser`.

class Task(NamedTuple):
    number: int                     # 1..T
    old: int                        # classes 0..old-1 are those of earlier tasks
    seen: int                       # classes 0..seen-1 are those and this task's
    images: torch.Tensor            # (n, 3, S, S) uint8, of this task alone
    labels: torch.Tensor            # (n,)
    pool_images: torch.Tensor       # (n + m, 3, S, S): these and the m in the buffer; batches are
    pool_labels: torch.Tensor       # (n + m,)          drawn from them
    prototypes: torch.Tensor        # (K, d), of all classes
    recipe: dict                    # of the views, for `augment`


def make_task(data, t, buffer, prototypes):
    """Task t = 1..T of the data, with the images that the buffer holds."""
    classes = data.tasks[t - 1]
    mine = of_classes(data.train_labels, classes)
    images, labels = data.train_images[mine], data.train_labels[mine]
    return Task(t, classes[0], classes[-1] + 1, images, labels,
                torch.cat([images, buffer.images.to(images.device)]),
                torch.cat([labels, buffer.labels.to(images.device)]), prototypes, data.recipe)


def learning_rate(progress, epochs, lr):
    """The rate at progress 0..1 of a task: cosine from lr to lr/1000, linear warm-up from 0.01.

    Warm-up takes 10 epochs, at most a tenth of the task; it starts at lr/10 where that is less.
    """
    cosine = lambda p: lr / 1000 + (lr - lr / 1000) * (1 + math.cos(math.pi * p)) / 2
    warm = min(10 / epochs, 0.1)
    if progress >= warm:
        return cosine(progress)
    start = min(0.01, lr / 10)
    return start + (cosine(warm) - start) * progress / warm


def train_step(images, labels, task, net, teacher, predictor, optimizer, c, generator, alpha):
    """One step on N images, two views each, with settings `c` and alpha of Eq. 10.

    Views are drawn from `generator`. Returns plasticity, stability and the length of the mean
    embedding (1: all views at one point) as a tensor on the device: nobody waits for it.
    """
    mine = share(2 * len(labels))                               # all views; of W processes, a Wth
    x = augment(images.repeat(2, 1, 1, 1), generator, share=mine, **task.recipe)
    y = labels.repeat(2)                                                        # (2N,)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=c.amp):
        z = net(x)                                                              # (2N/W, d)
        if teacher is not None:
            z_distil = predictor(z) if c.predictor else z   # what HSD compares with z_past
            with torch.no_grad():
                z_past = teacher(x)                                             # (2N/W, d)
    z = gather(z)                                                               # (2N, d)

    current = y >= task.old                                 # views of old images are no anchors
    if c.plasticity == "fnc2":
        old_prototypes = None if c.no_pseudo_replay else task.prototypes[:task.old]     # P_1:t-1
        plasticity = fnc2_loss(z, y, task.prototypes, old_prototypes, current,
                               tau=c.tau, gamma=c.gamma)
    else:
        plasticity = supcon_loss(z, y, current, tau=c.tau)
    stability = torch.zeros_like(plasticity)
    if teacher is not None:
        stability = hsd_loss(gather(z_distil), gather(z_past), task.prototypes[:task.seen],  # P_1:t
                             alpha, kappa_current=c.kappa_current, kappa_past=c.kappa_past,
                             zeta_current=c.zeta_current, zeta_past=c.zeta_past)
    loss = c.plasticity_weight * plasticity + c.stability_weight * stability            # Eq. 6

    optimizer.zero_grad()
    loss.backward()
    sum_gradients(optimizer)
    optimizer.step()
    return torch.stack([plasticity, stability, z.mean(0).norm()]).detach()


def train_epoch(epoch, epochs, task, net, teacher, predictor, optimizer, c, generator):
    """Epoch 1..epochs of a task, as a dictionary for the log; the losses are read once, at its end.

    An epoch is a new random order of the pool, cut into batches of one size; the images left over
    (fewer than a batch) sit this epoch out. A pool smaller than a batch is one batch.
    """
    device, n = task.pool_labels.device, len(task.pool_labels)
    size = min(c.batch_size, n - n % processes())
    if size == 0:
        raise Problem(f"task {task.number} has {n} images, fewer than the {processes()} processes")
    steps = n // size
    alpha = {"hsd": hsd_alpha(epoch, epochs, c.e0, c.alpha_max), "ird": 0.0, "sprd": 1.0,
             "none": 0.0}[c.stability] if teacher is not None else 0.0
    order = torch.randperm(n, generator=generator).to(device)
    total, start, shown = torch.zeros(3, device=device), time.perf_counter(), 0.0
    for step in range(steps):
        rate = learning_rate((epoch - 1 + step / steps) / epochs, epochs, c.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = order[step * size:(step + 1) * size]
        total += train_step(task.pool_images[batch], task.pool_labels[batch], task, net, teacher,
                            predictor, optimizer, c, generator, alpha)
        if sys.stdout.isatty() and time.perf_counter() - shown > 0.5:
            shown = time.perf_counter()
            print(f"\r  task {task.number} epoch {epoch}/{epochs} step {step + 1}/{steps} ",
                  end="", flush=True)
    plasticity, stability, length = (total / steps).tolist()    # here the host waits for the device
    seconds = time.perf_counter() - start
    return {"task": task.number, "epoch": epoch, "plasticity": plasticity, "stability": stability,
            "chance": chance(task, c), "mean_embedding": length, "alpha": alpha, "lr": rate,
            "views_per_second": 2 * size * steps / seconds, "seconds": seconds}


def make_net(c, device, predictor=False):
    """The network, or the predictor, with initial weights from a stream of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(c.seed, "predictor" if predictor else "weights"))
        return place(Predictor(c.dim) if predictor else Encoder(c.width, c.dim), device)


def make_optimizer(c, *modules):
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.SGD(parameters, lr=c.lr, momentum=0.9, weight_decay=1e-4)


def train(c, data, device, out):
    """The task loop, from wherever the run in `out` stands."""
    buffer = ReservoirBuffer(c.buffer, seed=seed_for(c.seed, "buffer"))
    prototypes = simplex_etf(c.prototypes or len(data.names), c.dim, seed=c.seed).to(device)
    net, predictor, teacher = make_net(c, device), make_net(c, device, predictor=True), None
    optimizer = make_optimizer(c, net, predictor)           # one for all tasks: momentum goes on

    def save_state(name, t, epoch):
        if rank() == 0:
            save(out / name, {
                "settings": vars(c), "task": t, "epoch": epoch, "net": net.state_dict(),
                "predictor": predictor.state_dict(), "buffer": buffer.state_dict(),
                "optimizer": optimizer.state_dict(), "prototypes": prototypes,
                "generator": generator.get_state()})

    state = latest_state(out, c, device)                    # None at the beginning
    if state:
        prototypes = state["prototypes"]
        net.load_state_dict(state["net"])
        predictor.load_state_dict(state["predictor"])       # unchanged without --predictor
        optimizer.load_state_dict(state["optimizer"])
        if state["task"] > 1:                   # empty before, and --init may change its capacity
            buffer.load_state_dict(state["buffer"])
    log = open_log(out, state)
    compiled = torch.compile if c.compile else lambda module: module
    forward, saved = compiled(net.train()), time.monotonic()
    for t in range(state["task"] if state else 1, c.tasks + 1):
        task = make_task(data, t, buffer, prototypes)
        epochs = c.epochs if t > 1 else c.epochs_first
        if t > 1 and c.stability != "none":     # from its file: after a resume net is further on
            teacher = compiled(frozen_copy(load_task(out / f"task{t - 1}.pt", c, device)[1]))
        generator = torch.Generator().manual_seed(seed_for(c.seed, f"task {t}"))  # batches, views
        done = 0
        if state:                                           # inside this task, or at its very end
            generator.set_state(state["generator"].cpu())
            done, state = state["epoch"], None
        for epoch in range(done + 1, epochs + 1):
            entry = train_epoch(epoch, epochs, task, forward, teacher, predictor, optimizer, c,
                                generator)
            report(entry, epochs, task, c)
            print(json.dumps(entry), file=log, flush=True)
            if epoch < epochs and time.monotonic() - saved >= 60 * c.save_every:
                save_state("last.pt", t, epoch)
                saved = time.monotonic()
        save_state(f"task{t}.pt", t, epochs)    # with the buffer that task t trained with (D13)
        wait_for_all()                                      # they read the teacher from this file
        buffer.add(task.images, task.labels)    # every image of the finished task, offered once
    log.close()


# ------------------------------------------------------------------------ several processes
# torchrun starts W copies of this program. Each holds all images and draws the same numbers, so all
# agree on every batch and view. Each makes and encodes its share of the views; the embeddings are
# gathered, every process computes the loss of the whole batch, and the gradients of the shares add
# up to that of one process. The first alone prints and writes. Without torchrun W is 1.

def rank():                                     # torchrun sets LOCAL_RANK, others may set RANK
    return int(os.environ["RANK"]) if "LOCAL_RANK" in os.environ else 0


def processes():
    return int(os.environ["WORLD_SIZE"]) if "LOCAL_RANK" in os.environ else 1


def wait_for_all():
    if processes() > 1:
        dist.barrier()


def place(module, device):
    """To the device; there BatchNorm spans all processes, where torch can do that."""
    if processes() > 1 and device.type == "cuda":
        module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)
    return module.to(device, memory_format=torch.channels_last)


def share(n):
    """Which of n views are this process's."""
    return slice(rank() * n // processes(), (rank() + 1) * n // processes())


def gather(z):
    """Embeddings of all views from those of every share: (n/W, d) -> (n, d)."""
    if processes() == 1:
        return z
    parts = [torch.empty_like(z) for _ in range(processes())]
    dist.all_gather(parts, z.detach().contiguous())
    parts[rank()] = z                           # the gradient flows through one's own share
    return torch.cat(parts)


def sum_gradients(optimizer):
    """Add up what all shares contribute to the gradient."""
    if processes() > 1:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(total.view(grad.shape))


# ------------------------------------------------------------------------ what is told on the way

def report(entry, epochs, task, c):
    """Print where an epoch is, its losses, the speed and the time left; stop or warn where due."""
    t, epoch, loss = task.number, entry["epoch"], entry["plasticity"]
    line = f"task {t}/{c.tasks}  epoch {epoch:>3}/{epochs}  {c.plasticity} {loss:.4f}"
    if t > 1 and c.stability != "none":
        line += f"  {c.stability} {entry['stability']:.4f}"
        line += f"  alpha {entry['alpha']:.2f}" if c.stability == "hsd" else ""
    images = (epochs - epoch) * len(task.pool_labels)
    images += (c.tasks - t) * c.epochs * (len(task.labels) + c.buffer)
    hours = 2 * images / entry["views_per_second"] / 3600
    left = f"{60 * hours:.1f} min" if hours < 1.5 else f"{hours:.1f} h"
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    print(f"{clear}{line}  lr {entry['lr']:.4f}  {entry['views_per_second']:.0f} views/s  "
          f"{left} left", flush=True)
    if not math.isfinite(loss + entry["stability"]):
        raise Problem(f"the loss is not finite in task {t}, epoch {epoch}: {c.plasticity} {loss}, "
                      f"{c.stability} {entry['stability']}. {c.out} keeps earlier epochs, but "
                      "--resume would go the same way again: start a new run with a smaller --lr")
    if t == epoch == 1 and hours > 24:
        print(f"note: at this speed the run takes {hours / 24:.1f} days; a GPU is faster, and "
              "--width, --image-size, --limit-per-class, --epochs-first and --epochs make it less")
    if epoch < epochs or task.seen == 1:                    # a single class has nothing to tell
        return
    if entry["mean_embedding"] > 0.99:
        print(f"warning: task {t} ends with all views at one point (length of the mean embedding "
              f"{entry['mean_embedding']:.4f}): the network has collapsed; a smaller --lr helps")
    elif loss > 0.999 * entry["chance"]:
        print(f"warning: task {t} ends with {c.plasticity} {loss:.4f}, chance is "
              f"{entry['chance']:.4f}: it was not learned; another --lr or more epochs may help")


def chance(task, c):
    """The plasticity loss where all similarities are equal: about ln(2N-1 + old prototypes)."""
    others, focus = 2 * min(c.batch_size, len(task.pool_labels)) - 1, 1
    if c.plasticity == "fnc2":
        others += 0 if c.no_pseudo_replay else task.old
        focus = (1 - 1 / others) ** c.gamma
    return math.log(others) * focus * len(task.labels) / len(task.pool_labels)  # old views count 0


# ------------------------------------------------------------------------ the run folder

def open_run(path):
    """A run's settings, as a namespace, and its finished tasks, task1.pt, task2.pt, ..."""
    path, finished = Path(path), []
    if not (path / "config.json").is_file():
        raise Problem(f"{path} is not a run: it has no config.json")
    try:
        saved = json.loads((path / "config.json").read_text())["settings"]
        if saved.keys() != vars(build_parser().parse_args([])).keys() | {"classes"}:
            raise ValueError
        DATASETS[saved["dataset"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Problem(f"{path / 'config.json'} is damaged, or not of this version of the program"
                      ) from None
    while (path / f"task{len(finished) + 1}.pt").is_file():
        finished.append(path / f"task{len(finished) + 1}.pt")
    return argparse.Namespace(**saved), finished


def latest_state(out, c, device):
    """The furthest state of the run in `out`; of a new run --init's first task, or None."""
    finished = open_run(out)[1]
    if (out / "last.pt").exists():
        state = load_task(out / "last.pt", c, device)[0]
        if state["task"] > len(finished):       # it is written inside tasks, and may be older
            return state
    newest = finished[-1] if finished else c.init and Path(c.init) / "task1.pt"
    return load_task(newest, c, device)[0] if newest else None


def load_task(file, c, device):
    """What a task<t>.pt or last.pt holds, and the network in it."""
    keys = ("task", "epoch", "net", "predictor", "optimizer", "prototypes", "buffer", "generator")
    state, net = read(file, device, keys), Encoder(c.width, c.dim)
    try:
        net.load_state_dict(state["net"])
    except (RuntimeError, TypeError, AttributeError):
        raise Problem(f"{file} is not of this run: its network is not of width {c.width} and "
                      f"dim {c.dim}") from None
    return state, place(net, torch.device(device))


def load_data(c, device, data_dir=None):
    """The data of a run with settings `c`, all of it on the device."""
    data = load(c.dataset, data_dir or c.data_dir, tasks=c.tasks, image_size=c.image_size,
                limit_per_class=c.limit_per_class, val_fraction=c.val_fraction, seed=c.seed)
    if c.classes not in (None, data.names):
        raise Problem(f"{data_dir or c.data_dir} has other classes than the run was trained on")
    moved = {name: value.to(device) for name, value in data._asdict().items()
             if isinstance(value, torch.Tensor)}
    colours = {name: torch.tensor(data.recipe[name], device=device) for name in ("mean", "std")}
    return data._replace(**moved, recipe=data.recipe | colours)


def open_log(out, state):
    """log.jsonl for appending, without lines of epochs after the state that we go on from."""
    path, lines = out / "log.jsonl", []
    if rank() > 0:
        return open(os.devnull, "w")
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):               # a line cut short by a kill
            entry = json.loads(line)
            if state and (entry["task"], entry["epoch"]) <= (state["task"], state["epoch"]):
                lines.append(line + "\n")
    write(path, "".join(lines).encode())
    return open(path, "a")


# ------------------------------------------------------------------------ settings

# FREE may change on --resume and among runs that are averaged: they move rounding at most.
# LATER may change with --init too: they do not touch task 1.
FREE = {"data_dir", "device", "compile", "out", "resume", "init", "save_every"}
LATER = {"buffer", "stability", "stability_weight", "no_pseudo_replay", "predictor", "alpha_max",
         "epochs", "e0", "kappa_past", "kappa_current", "zeta_past", "zeta_current"}


def number(kind, low, high, above=False):
    """An argparse type: a number of `kind`, low <= it <= high, or low < it if `above`."""
    def parse(text):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if low <= value <= high and not (above and value == low):
                return value
        word, start = "a whole number" if kind is int else "a number", "above" if above else "from"
        raise argparse.ArgumentTypeError(f"{text!r} should be {word} {start} {low} to {high}")
    return parse


def build_parser():
    """Every setting of a run, its kind, default (None: see PRESETS) and meaning."""
    parser = argparse.ArgumentParser(
        prog="train.py", allow_abbrev=False, description=__doc__.split("\n")[0],
        usage="python train.py [flags]  (--help lists them)")

    def flag(name, kind, default, text):
        how = ({"action": "store_true"} if kind is bool else {"choices": kind, "default": default}
               if isinstance(kind, list) else {"type": kind, "default": default, "metavar": "X"})
        group.add_argument(name, help=text, **how)

    count, weight = number(int, 1, 10**6), number(float, 0, 1000)
    positive = number(float, 0, 1000, above=True)
    group = parser.add_argument_group("data")
    flag("--dataset", list(DATASETS), "shapes", "(shapes)")
    flag("--data-dir", str, "data", "where datasets are, or are downloaded to (data)")
    flag("--tasks", count, None, "number of tasks (the dataset's own); 1 is joint training")
    flag("--buffer", number(int, 0, 10**7), 0, "images kept of old tasks; paper: 0, 200, 500 (0)")
    flag("--image-size", number(int, 4, 1024), None, "resize images, once (the dataset's)")
    flag("--limit-per-class", count, None, "use the first so many training images of each class")
    flag("--val-fraction", number(float, 0, 0.9), 0.0, "hold out for eval.py --split val (0)")
    group = parser.add_argument_group("method; the paper's values are the presets")
    flag("--plasticity", ["fnc2", "supcon"], "fnc2", "loss of the current task (fnc2)")
    flag("--stability", ["hsd", "ird", "sprd", "none"], "hsd", "distillation, from task 2 on (hsd)")
    flag("--no-pseudo-replay", bool, False, "no old prototypes in FNC2's D_i")
    flag("--plasticity-weight", weight, None, "(tau/0.07, the authors' code; paper's formula: 1)")
    flag("--stability-weight", weight, 1.0, "(1)")
    flag("--predictor", bool, False, "distil through a small MLP, as the authors' code does")
    flag("--gamma", number(float, 0, 100), None, "focus of FNC2; paper: 1 (cifar10), 4")
    flag("--tau", positive, None, "temperature of the plasticity loss; paper: 0.5")
    flag("--e0", number(int, 0, 10**6), None, "first epochs, IRD alone; paper: 30 of 100 (share)")
    flag("--alpha-max", number(float, 0, 1), 1.0, "alpha grows no further (1); authors' code: 0.5")
    flag("--kappa-past", positive, None, "IRD, teacher; paper: 0.01, 0.1 (tinyimagenet)")
    flag("--kappa-current", positive, None, "IRD, student; paper: 0.2, 0.1 (tinyimagenet)")
    flag("--zeta-past", positive, None, "S-PRD, teacher; paper: 0.01 (cifar10), 0.1")
    flag("--zeta-current", positive, None, "S-PRD, student; paper: 0.2")
    group = parser.add_argument_group("training")
    flag("--seed", number(int, 0, 2**31), 0, "(0)")
    flag("--epochs-first", count, None, "of task 1; paper: 500")
    flag("--epochs", count, None, "of each later task; paper: 100, 50 (tinyimagenet)")
    flag("--batch-size", number(int, 2, 10**6), None, "images, two views each; paper: 512")
    flag("--lr", positive, None, "paper: 0.5, 0.1 (tinyimagenet)")
    flag("--dim", number(int, 1, 10**5), None, "of embeddings; paper: 128, 256 (tinyimagenet)")
    flag("--width", number(int, 8, 1024), None, "of the network; paper: 64, which is ResNet-18")
    flag("--prototypes", number(int, 2, 10**5), None, "fixed in advance (as many as classes)")
    group = parser.add_argument_group("running")
    flag("--device", str, "auto", "auto, cpu, cuda, cuda:1, mps (auto)")
    flag("--amp", bool, False, "bfloat16 autocast around the encoder")
    flag("--compile", bool, False, "torch.compile the encoder, teacher included")
    flag("--out", str, None, "run folder (runs/<dataset>-buffer<N>-seed<S>)")
    flag("--resume", bool, False, "go on with the run in --out, with its settings")
    flag("--init", str, None, "start at task 2 with this run's first task and its settings; flags "
         "may change what concerns later tasks (stability, epochs, buffer)")
    flag("--save-every", weight, 5.0, "minutes at least between two writings of last.pt (5)")
    return parser


def parse(argv):
    """All settings: the flags, then those of the run that this one goes on from, then presets."""
    parser = build_parser()
    flags = parser.parse_args(argv)
    if flags.resume and flags.init:
        raise Problem(f"--init {flags.init} starts a run, --resume goes on with one: give one")
    folder = lambda c: c.out or f"runs/{c.dataset}-buffer{c.buffer}-seed{c.seed}"
    saved = vars(open_run(flags.init or folder(flags))[0]) if flags.resume or flags.init else {}
    for key in ("out", "resume") + ("init",) * bool(flags.init):
        saved.pop(key, None)
    if flags.init and flags.epochs:             # other epochs, their share of e0
        saved.pop("e0")
    name = saved.get("dataset", flags.dataset)
    preset = PRESETS.get(name, PRESETS["folder"])
    table = {"tasks": DATASETS[name]["tasks"], "image_size": DATASETS[name]["size"]}
    parser.set_defaults(**{"classes": None} | table | preset | {"e0": None} | saved)
    c = parser.parse_args(argv)                 # again, now that the defaults are known
    for key in sorted(saved.keys() - FREE - (LATER if flags.init else set())):
        value = getattr(c, key)
        if value != saved[key]:
            flag = "--" + key.replace("_", "-") + ("" if value is True else f" {value}")
            raise Problem(f"{flag}, the run has {saved[key]}: leave the flag out, or start a run "
                          "of its own")
    if c.e0 is None:                            # the preset's share of the epochs that there are
        c.e0 = round(preset["e0"] * c.epochs / preset["epochs"])
    if c.plasticity_weight is None:
        c.plasticity_weight = c.tau / 0.07
    c.out = folder(c)
    return c


def check(c, classes):
    """Settings that contradict each other or the number of classes."""
    count = c.prototypes or classes
    split_tasks(classes, c.tasks)
    if count < classes:
        raise Problem(f"--prototypes {count} are fewer than the {classes} classes")
    if c.dim < count - 1:
        raise Problem(f"--dim {c.dim} is too small for {count} prototypes: at least {count - 1}")
    if c.stability == "hsd" and c.e0 >= c.epochs:
        raise Problem(f"--e0 {c.e0} of --epochs {c.epochs} leaves no epoch for S-PRD: choose a "
                      "smaller --e0, or --stability ird")
    if c.batch_size % processes():
        raise Problem(f"--batch-size {c.batch_size} is not a multiple of the {processes()} "
                      "processes that share it")


def seed_for(seed, purpose):
    """Streams of their own from one --seed: what one of them draws moves none of the others.

    The prototypes, the validation split and eval.py take the seed itself.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:7], "big")


# ------------------------------------------------------------------------ command line

def pick_device(name):
    """--device as a torch.device; auto takes CUDA, then MPS, then the CPU."""
    if name == "auto":
        name = ("cuda" if torch.cuda.is_available() else
                "mps" if torch.backends.mps.is_available() and processes() == 1 else "cpu")
    if processes() > 1 and name not in ("cuda", "cpu"):
        raise Problem(f"--device {name} is one device, but there are {processes()} processes: give "
                      "cuda or cpu")
    if name == "cuda" and processes() > 1:
        name = f"cuda:{os.environ['LOCAL_RANK']}"               # a GPU for each process
    with contextlib.suppress(RuntimeError, AssertionError):     # unknown, or not in this torch
        device = torch.empty(1, device=name).device             # with its number: cuda is cuda:0
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if device.type in ("cpu", "cuda", "mps"):
            return device
    raise Problem(f"--device {name} is not to be had here: give auto, cpu, or a cuda or mps device "
                  "that torch sees")


def command(main):
    """Run main(argv) as a program: what the user can mend ends it with one sentence, status 2."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (Problem, OSError, RuntimeError) as problem:
        if isinstance(problem, RuntimeError):
            if not re.search("out of memory|allocate memory|not enough memory", str(problem)):
                raise
            problem = (f"too little memory ({str(problem).splitlines()[0][:100]}): a smaller "
                       "--batch-size or --image-size, or --amp, needs less")
        if rank() > 0:
            time.sleep(10)      # the first process says the same, and then torchrun ends this one
        print(f"{Path(sys.argv[0]).name}: error: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def check_machine(c, out, device):
    """What the run folder, --amp, --compile and --init lack is told before anything is made."""
    if out.exists() and not out.is_dir():
        raise Problem(f"--out {out} is a file, not a folder")
    held = [path.name for name in ("config.json", "*.pt", "log.jsonl") for path in out.glob(name)]
    if held and not c.resume:
        raise Problem(f"{out} holds a run already ({held[0]}): go on with --resume, or choose "
                      "another --out")
    if c.amp and (device.type == "mps"
                  or device.type == "cuda" and not torch.cuda.is_bf16_supported(False)):
        raise Problem(f"--amp needs bfloat16, which {device} does not have: leave it out")
    if c.compile:
        try:
            torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
        except Exception as error:                          # no compiler, mostly
            raise Problem(f"--compile fails here ({type(error).__name__}): leave it out") from None
    if c.init and not c.resume:
        if not open_run(c.init)[1]:
            raise Problem(f"--init {c.init}: that run has not finished its first task")
        load_task(Path(c.init) / "task1.pt", c, "cpu")


def main(argv):
    """Settle the settings, find what is wrong before anything is made, then train."""
    c = parse(argv)
    out, device = Path(c.out), pick_device(c.device)
    if DATASETS[c.dataset]["classes"]:
        check(c, DATASETS[c.dataset]["classes"])
    check_machine(c, out, device)
    torch.backends.cudnn.benchmark = True                   # batches keep one shape
    if processes() > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                                timeout=timedelta(hours=2))
    if rank() > 0:
        sys.stdout = open(os.devnull, "w")
        wait_for_all()                                      # (a) the first may download the data
    data = load_data(c, device)
    c.classes = data.names
    check(c, len(c.classes))
    print(f"{c.dataset}: {c.tasks} tasks of {len(data.tasks[0])} classes, {len(data.train_labels)} "
          f"training images, {c.plasticity} + {c.stability}, buffer {c.buffer}, seed {c.seed}, "
          f"{device}, in {out}", flush=True)
    if processes() > 1 and device.type != "cuda":
        print(f"note: on {device.type} each of the {processes()} processes normalises by its own "
              "share of the views: torch has a BatchNorm over all of them for CUDA only")
    go_on = f"python train.py --resume --out {out}"
    try:
        if rank() == 0:
            prepare(c, out, device)
            wait_for_all()                                  # (a) now the others load theirs
        wait_for_all()                                      # until all hold the data
        train(c, data, device, out)
        if processes() > 1:
            dist.destroy_process_group()
    except KeyboardInterrupt:
        print(f"\nstopped; go on with: {go_on}")
        return 130
    except OSError as error:
        raise Problem(f"{out} cannot be written ({error}); what was saved before is whole: make "
                      f"room, then {go_on}") from None
    print(f"finished. Evaluate with: python eval.py {out}")


def prepare(c, out, device):
    """The run folder with its config.json, without leftovers of a `write` that was killed."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in (path for name in ("config.json", "log.jsonl", "*.pt")
                  for path in out.glob(f"{name}.*.tmp")):
        stale.unlink()
    if not c.resume:
        versions = {"torch": torch.__version__, "python": platform.python_version(),
                    "device": str(device), "threads": torch.get_num_threads(),
                    "processes": processes()}
        write(out / "config.json", json.dumps({"settings": vars(c)} | versions, indent=1).encode())


if __name__ == "__main__":
    command(main)
