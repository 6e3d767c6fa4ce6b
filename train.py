"""Stage 1: learn tasks one after the other with L = w L_FNC2 + L_HSD (Eq. 6, where w = 1).

    python train.py                                  # drawn shapes, minutes on a laptop, no files
    python train.py --dataset cifar10 --buffer 0     # the paper's headline run (a GPU and hours)
    python train.py --dataset cifar10 --plasticity supcon --stability ird      # Co2L

What the flags leave unset is filled by the dataset's preset below; w is --plasticity-weight, see D9
in the README. A run folder holds config.json, log.jsonl (a line per epoch), task<t>.pt (network,
prototypes, the buffer that task t trained with) and last.pt (all that --resume needs to go on).
`python eval.py RUN` evaluates it.
"""

import argparse
import contextlib
import hashlib
import json
import math
import platform
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from buffer import ReservoirBuffer
from data import DATASETS, Problem, augment, normalise, of_classes, read, save, split_tasks, write
from etf import simplex_etf
from eval import (SAME_RESULT, accuracies, command, encode, load_data, load_task, number, open_run,
                  pick_device)
from losses import fnc2_loss, hsd_alpha, hsd_loss, supcon_loss
from model import Encoder, frozen_copy

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
AFTER_TASK_1 = {"buffer", "stability", "stability_weight", "pseudo_replay", "epochs", "e0",
                "kappa_past", "kappa_current", "zeta_past", "zeta_current"}    # no effect on task 1
PART_OF = {"gamma": {"fnc2"}, "pseudo_replay": {"fnc2"}, "e0": {"hsd"},         # flag: losses
           "kappa_past": {"hsd", "ird"}, "kappa_current": {"hsd", "ird"},
           "zeta_past": {"hsd", "sprd"}, "zeta_current": {"hsd", "sprd"}}


# ------------------------------------------------------------------------ settings

def build_parser():
    """All flags are None unless given, so that presets and saved settings fill only those."""
    parser = argparse.ArgumentParser(
        prog="train.py", allow_abbrev=False, description=__doc__.split("\n")[0],
        usage="python train.py [flags]  (--help lists them)")

    def flag(name, kind, text, metavar=None, dest=None):
        dest = dest or name[2:].replace("-", "_")
        if isinstance(kind, bool):
            group.add_argument(name, action="store_const", const=kind, help=text, dest=dest)
        elif isinstance(kind, list):
            group.add_argument(name, choices=kind, help=text, dest=dest)
        else:
            group.add_argument(name, type=kind, help=text, metavar=metavar or "N", dest=dest)

    count, positive = number(int, 1, 10**6), number(float, 0, 1000, above=True)
    weight = number(float, 0, 1000)
    group = parser.add_argument_group("data")
    flag("--dataset", list(DATASETS), "(shapes)")
    flag("--data-dir", str, "where datasets are, or are downloaded to (data)", "DIR")
    flag("--tasks", count, "number of tasks (the dataset's own); 1 is joint training")
    flag("--buffer", number(int, 0, 10**7), "images kept of old tasks; paper: 0, 200, 500 (0)")
    flag("--image-size", number(int, 4, 1024), "resize images, once (the dataset's; shapes: 16)")
    flag("--limit-per-class", count, "use the first N training images of each class")
    flag("--val-fraction", number(float, 0, 0.9), "hold out for eval.py --split val (0)", "F")
    group = parser.add_argument_group("method; the paper's values are the presets")
    flag("--plasticity", ["fnc2", "supcon"], "loss of the current task (fnc2)")
    flag("--stability", ["hsd", "ird", "sprd", "none"], "distillation from task 2 on (hsd)")
    flag("--no-pseudo-replay", False, "no old prototypes in FNC2's D_i", dest="pseudo_replay")
    flag("--plasticity-weight", weight, "(tau/0.07, as Co2L's code; the paper's formula: 1)", "W")
    flag("--stability-weight", weight, "(1)", "W")
    flag("--gamma", number(float, 0, 100), "focus of FNC2; paper: 1 (cifar10), 4", "X")
    flag("--tau", positive, "temperature of the plasticity loss; paper: 0.5", "X")
    flag("--e0", number(int, 0, 10**6), "first epochs, IRD alone; paper: 30 of 100 (as this share)")
    flag("--kappa-past", positive, "IRD, teacher; paper: 0.01, 0.1 (tinyimagenet)", "X")
    flag("--kappa-current", positive, "IRD, student; paper: 0.2, 0.1 (tinyimagenet)", "X")
    flag("--zeta-past", positive, "S-PRD, teacher; paper: 0.01 (cifar10), 0.1", "X")
    flag("--zeta-current", positive, "S-PRD, student; paper: 0.2", "X")
    group = parser.add_argument_group("training")
    flag("--seed", number(int, 0, 2**31), "(0)")
    flag("--epochs-first", count, "of task 1; paper: 500")
    flag("--epochs", count, "of each later task; paper: 100, 50 (tinyimagenet)")
    flag("--batch-size", count, "images, two views each; paper: 512")
    flag("--lr", positive, "paper: 0.5, 0.1 (tinyimagenet)", "X")
    flag("--dim", number(int, 1, 10**5), "of the embeddings; paper: 128, 256 (tinyimagenet)")
    flag("--width", number(int, 8, 1024), "of the network; paper: 64, which is ResNet-18")
    flag("--prototypes", number(int, 2, 10**5), "fixed in advance (as many as classes)")
    group = parser.add_argument_group("running")
    flag("--device", str, "auto, cpu, cuda, cuda:1, mps (auto)", "NAME")
    flag("--amp", True, "bfloat16 autocast around the encoder")
    flag("--compile", True, "torch.compile the encoder, teacher included")
    flag("--out", str, "run folder (runs/<dataset>-buffer<N>-seed<S>)", "RUN")
    flag("--resume", True, "go on with the run in --out, with its settings")
    flag("--init", str, "start at task 2 with this run's task 1 and its settings; those of later "
         "tasks (epochs, stability, buffer, ...) are not taken over", "RUN")
    flag("--save-every", count, "epochs between writings of last.pt (1)")
    flag("--profile", count, "time N steps of task 2 and write nothing")
    return parser


def spelled(key):
    """The flag of a setting."""
    return "--no-pseudo-replay" if key == "pseudo_replay" else "--" + key.replace("_", "-")


def settings(flags, saved=None, inherit=()):
    """All settings of a run: the flags, then what is `inherit`ed from a saved run, then presets."""
    given = {key: value for key, value in vars(flags).items() if value is not None}
    kept = {key: saved[key] for key in inherit if key in saved}
    for key in kept.keys() & given.keys() - SAME_RESULT:
        if given[key] != kept[key]:
            value = "" if isinstance(given[key], bool) else f" {given[key]}"
            raise Problem(f"{spelled(key)}{value}, the run has {kept[key]}: leave the flag out, or "
                          "start a run of its own")
    flagged, given = given.keys(), kept | given
    name = given.get("dataset", "shapes")
    preset = PRESETS.get(name, PRESETS["folder"])
    c = dict(dataset=name, data_dir="data", buffer=0, tasks=DATASETS[name]["tasks"], seed=0,
             image_size=DATASETS[name]["size"], limit_per_class=None, val_fraction=0.0,
             plasticity="fnc2", stability="hsd", pseudo_replay=True, stability_weight=1.0,
             prototypes=None, device="auto", amp=False, compile=False, resume=False, init=None,
             save_every=1, profile=None, classes=None)
    c |= preset | given
    if "e0" not in given:                       # the preset's share of the epochs that there are
        c["e0"] = round(preset["e0"] * c["epochs"] / preset["epochs"])
    for key in flagged & PART_OF.keys():
        if not PART_OF[key] & {c["plasticity"], c["stability"]}:
            raise Problem(f"{spelled(key)} is part of {' and '.join(sorted(PART_OF[key]))}, which "
                          f"{c['plasticity']} + {c['stability']} does without: leave it out")
    c.setdefault("plasticity_weight", c["tau"] / 0.07)
    c.setdefault("out", f"runs/{name}-buffer{c['buffer']}-seed{c['seed']}")
    return SimpleNamespace(**c)


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
    for name, value in (("--init", c.init), ("--profile", c.profile)):
        if value and c.tasks == 1:
            raise Problem(f"{name} {value} is about the second task, but --tasks 1 has only one")


def seed_for(seed, purpose):
    """Streams of their own from one --seed: what one of them draws moves none of the others."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:7], "big")


# ------------------------------------------------------------------------ training

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


def train_step(images, labels, task, net, teacher, optimizer, c, generator, alpha,
               tick=lambda name: None):
    """One step on N images. Returns (plasticity, stability), on the device: nobody waits for it."""
    x = torch.cat([augment(images, generator, **task.views) for _ in range(2)])  # (2N, 3, S, S)
    y = labels.repeat(2)                                                         # (2N,)
    tick("augmentation")
    with torch.autocast(x.device.type, torch.bfloat16, enabled=c.amp):
        z = net(x)                                                               # (2N, d)
        tick("student forward")
        if teacher is not None:
            with torch.no_grad():
                z_past = teacher(x)                                              # (2N, d)
            tick("teacher forward")

    current = y >= task.first                               # views of old images are no anchors
    if c.plasticity == "fnc2":
        use_old = c.pseudo_replay and task.first
        old_prototypes = task.prototypes[:task.first] if use_old else None       # P_1:t-1
        plasticity = fnc2_loss(z, y, task.prototypes, old_prototypes, current,
                               tau=c.tau, gamma=c.gamma)
    else:
        plasticity = supcon_loss(z, y, current, tau=c.tau)
    stability = torch.zeros_like(plasticity)
    if teacher is not None:
        stability = hsd_loss(z, z_past, task.prototypes[:task.seen], alpha,      # P_1:t
                             kappa_current=c.kappa_current, kappa_past=c.kappa_past,
                             zeta_current=c.zeta_current, zeta_past=c.zeta_past)
    loss = c.plasticity_weight * plasticity + c.stability_weight * stability
    tick("loss")
    optimizer.zero_grad()
    loss.backward()
    tick("backward")
    optimizer.step()
    tick("optimizer")
    return torch.stack([plasticity.detach(), stability.detach()])


def train_epoch(epoch, epochs, task, net, teacher, optimizer, c, generator):
    """Epoch 1..epochs of a task, as a dictionary for the log; the losses are read once, at its end.

    An epoch is a new random order of the pool, cut into batches of one size; the images left over
    (fewer than a batch) sit this epoch out. A pool smaller than a batch is one batch.
    """
    device, n = task.pool_labels.device, len(task.pool_labels)
    size = min(c.batch_size, n)
    steps = n // size
    alpha = {"hsd": hsd_alpha(epoch, epochs, c.e0), "sprd": 1.0}.get(c.stability, 0.0)
    order = torch.randperm(n, generator=generator).to(device)
    total, start, shown = torch.zeros(2, device=device), time.perf_counter(), 0.0
    for step in range(steps):
        rate = learning_rate((epoch - 1 + step / steps) / epochs, epochs, c.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = order[step * size:(step + 1) * size]
        total += train_step(task.pool_images[batch], task.pool_labels[batch], task, net, teacher,
                            optimizer, c, generator, alpha)
        if sys.stdout.isatty() and time.perf_counter() - shown > 0.5:
            shown = time.perf_counter()
            print(f"\r  task {task.number} epoch {epoch}/{epochs} step {step + 1}/{steps} "
                  f"{2 * size * (step + 1) / (shown - start):.0f} views/s ", end="", flush=True)
    plasticity, stability = (total / steps).tolist()        # here the host waits for the device
    seconds = time.perf_counter() - start
    return {"task": task.number, "epoch": epoch, "plasticity": plasticity, "stability": stability,
            "alpha": alpha, "lr": rate, "views_per_second": 2 * size * steps / seconds,
            "seconds": seconds}


def make_net(c, device):
    """The network, with initial weights from their own stream."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(c.seed, "weights"))
        return Encoder(c.width, c.dim).to(device, memory_format=torch.channels_last)


def make_optimizer(net, c):
    return torch.optim.SGD(net.parameters(), lr=c.lr, momentum=0.9, weight_decay=1e-4)


def make_prototypes(c, data, device):
    count = c.prototypes or data.tasks[-1][-1] + 1
    return simplex_etf(count, c.dim, seed=c.seed).to(device)


def make_task(data, t, buffer, prototypes):
    """Task t = 1..T: its images, the pool of them and the buffer's, its place in the classes."""
    classes = data.tasks[t - 1]
    mine = of_classes(data.train_labels, classes)
    images, labels = data.train_images[mine], data.train_labels[mine]
    return SimpleNamespace(                     # classes 0..first-1 are old, 0..seen-1 are seen
        number=t, first=classes[0], seen=classes[-1] + 1, prototypes=prototypes, views=data.views,
        images=images, labels=labels,
        pool_images=torch.cat([images, buffer.images.to(images.device)]),
        pool_labels=torch.cat([labels, buffer.labels.to(images.device)]))


def train(c, data, device, out):
    """The task loop, from wherever the run in `out` stands."""
    buffer = ReservoirBuffer(c.buffer, seed=seed_for(c.seed, "buffer"))
    state = None
    if (out / "last.pt").exists():
        state, net = load_task(out / "last.pt", c, device)
        prototypes = state["prototypes"]
        buffer.load_state_dict(state["buffer"])
    elif c.init:
        first, net = load_task(Path(c.init) / "task1.pt", c, device)
        prototypes = first["prototypes"]
    else:
        prototypes, net = make_prototypes(c, data, device), make_net(c, device)
    compiled = torch.compile if c.compile else lambda module: module
    forward = compiled(net)
    log = open_log(out, state)
    for t in range(state["task"] if state else 1, c.tasks + 1):
        task = make_task(data, t, buffer, prototypes)
        epochs = c.epochs if t > 1 else 0 if c.init else c.epochs_first
        teacher = None
        if t > 1 and c.stability != "none":
            teacher = frozen_copy(net)
            if state:                           # net is already further than the teacher
                teacher.load_state_dict(read(out / f"task{t - 1}.pt", device, ["net"])["net"])
            teacher = compiled(teacher)         # compiled once: the next ones have the same shapes
        optimizer = make_optimizer(net, c)
        generator = torch.Generator().manual_seed(seed_for(c.seed, f"task {t}"))  # batches, views
        done, entry = 0, None
        if state:                               # in the middle of this task, or at its very end
            done, entry = state["epoch"], state["entry"]
            optimizer.load_state_dict(state["optimizer"])
            generator.set_state(state["generator"].cpu())
            state = None
        net.train()
        for epoch in range(done + 1, epochs + 1):
            entry = train_epoch(epoch, epochs, task, forward, teacher, optimizer, c, generator)
            check_finite(entry, c, out)
            log.write(json.dumps(entry) + "\n")
            log.flush()
            print(epoch_line(entry, epochs, task, c), flush=True)
            if epoch % c.save_every == 0 or epoch == epochs:
                save(out / "last.pt", {
                    "settings": vars(c), "task": t, "epoch": epoch, "entry": entry,
                    "net": net.state_dict(), "optimizer": optimizer.state_dict(),
                    "prototypes": prototypes, "buffer": buffer.state_dict(),
                    "generator": generator.get_state()})
        save(out / f"task{t}.pt", {"settings": vars(c), "task": t, "net": net.state_dict(),
                                   "prototypes": prototypes, "buffer": buffer.state_dict()})
        if entry:
            warn_if_idle(entry, task, c)
        report_task(net, data, c, task)
        buffer.add(task.images, task.labels)    # every image of the finished task, offered once
    log.close()


# ------------------------------------------------------------------------ what is told on the way

def open_log(out, state):
    """log.jsonl for appending, without lines of epochs after the checkpoint that we go on from."""
    path, lines = out / "log.jsonl", []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):           # a line cut short by a kill
                entry = json.loads(line)
                if state and (entry["task"], entry["epoch"]) <= (state["task"], state["epoch"]):
                    lines.append(line + "\n")
        write(path, "".join(lines).encode())
    return open(path, "a")


def epoch_line(entry, epochs, task, c):
    """What an epoch prints: where it is, each loss, the rate, the speed, the time left."""
    line = (f"task {task.number}/{c.tasks}  epoch {entry['epoch']:>3}/{epochs}  "
            f"{c.plasticity} {entry['plasticity']:.4f}")
    if task.number > 1 and c.stability != "none":
        line += f"  {c.stability} {entry['stability']:.4f}"
        line += f"  alpha {entry['alpha']:.2f}" if c.stability == "hsd" else ""
    images = (epochs - entry["epoch"]) * len(task.pool_labels)
    images += (c.tasks - task.number) * c.epochs * (len(task.labels) + c.buffer)
    minutes = 2 * images / entry["views_per_second"] / 60
    left = f"{minutes:.1f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    return (f"{clear}{line}  lr {entry['lr']:.4f}  {entry['views_per_second']:.0f} views/s  "
            f"{left} left")


def check_finite(entry, c, out):
    if not math.isfinite(entry["plasticity"] + entry["stability"]):
        raise Problem(
            f"the loss is not finite in task {entry['task']}, epoch {entry['epoch']}: "
            f"{c.plasticity} {entry['plasticity']}, {c.stability} {entry['stability']}. What was "
            f"saved in {out} is of earlier epochs. A new run with a smaller --lr usually helps")


def warn_if_idle(entry, task, c):
    """Equal similarities give ln(2N-1 + old prototypes): a loss that ends there learned nothing."""
    others = 2 * min(c.batch_size, len(task.pool_labels)) - 1
    others += task.first if c.plasticity == "fnc2" and c.pseudo_replay else 0
    chance = math.log(others) * ((1 - 1 / others) ** c.gamma if c.plasticity == "fnc2" else 1)
    if others > 1 and task.seen > 1 and entry["plasticity"] > 0.999 * chance:
        print(f"warning: task {task.number} ends with {c.plasticity} {entry['plasticity']:.4f}, "
              f"chance is {chance:.4f}: it was not learned; another --lr or more epochs usually "
              "help", flush=True)


def report_task(net, data, c, task):
    """Nearest-prototype accuracy so far, without classifier or stored images, where there is one.

    On the validation images where there are any: choosing settings must not see the test images.
    """
    split, images, labels = "test", data.test_images, data.test_labels
    if c.val_fraction:
        split, images, labels = "validation", data.val_images, data.val_labels
    shown = labels < task.seen
    plain = lambda x: normalise(x, data.views["mean"], data.views["std"])
    _, z = encode(net, images[shown], plain)
    if task.seen > 1 and z.mean(0).norm() > 0.99:           # 0.59-0.89 in runs that learn
        print(f"warning: after task {task.number} all {split} images lie at one point (length of "
              f"the mean embedding {z.mean(0).norm():.4f}): the network has collapsed; a smaller "
              "--lr usually helps", flush=True)
    if c.plasticity == "supcon":                            # no prototypes to be near
        return print(f"task {task.number} done.", flush=True)
    class_il, task_il = (sum(a) / len(a) for a in accuracies(
        z @ task.prototypes[:task.seen].T, labels[shown], data.tasks[:task.number]))
    print(f"task {task.number} done. Nearest prototype on {split} images: Class-IL "
          f"{class_il:.1f} %, Task-IL {task_il:.1f} %", flush=True)


# ------------------------------------------------------------------------ profile

def profile(c, data, device, steps):
    """Time steps of task 2, each followed by the bare network on a ready batch: where time goes."""
    def now():
        if device.type in ("cuda", "mps"):
            getattr(torch, device.type).synchronize()
        return time.perf_counter()

    def tick(name):
        nonlocal last
        parts.setdefault(name, []).append(now() - last)
        last = now()

    prototypes, net = make_prototypes(c, data, device), make_net(c, device)
    buffer, optimizer = ReservoirBuffer(c.buffer), make_optimizer(net, c)
    first = make_task(data, 1, buffer, prototypes)
    buffer.add(first.images, first.labels)
    task = make_task(data, 2, buffer, prototypes)
    compiled = torch.compile if c.compile else lambda module: module
    teacher = compiled(frozen_copy(net)) if c.stability != "none" else None
    forward, generator = compiled(net), torch.Generator().manual_seed(0)
    optimizer.param_groups[0]["lr"] = 0.0       # time does not depend on it, and nothing diverges
    size = min(c.batch_size, len(task.pool_labels))
    images, labels = task.pool_images[:size], task.pool_labels[:size]
    ready = torch.cat([augment(images, generator, **task.views) for _ in range(2)])
    parts, full, bare, warm = {}, [], [], 2
    for _ in range(warm + steps):
        begin = last = now()
        train_step(images, labels, task, forward, teacher, optimizer, c, generator, 0.5, tick)
        full.append(now() - begin)
        begin = now()
        with torch.autocast(device.type, torch.bfloat16, enabled=c.amp):
            z = forward(ready)
            if teacher is not None:
                with torch.no_grad():
                    teacher(ready)
        optimizer.zero_grad()
        z.sum().backward()
        optimizer.step()
        bare.append(now() - begin)

    mean = lambda times: sum(times[warm:]) / steps
    print(f"{device}, {torch.get_num_threads()} CPU threads, width {c.width}, {size} images, "
          f"{images.shape[-1]} pixels; mean of {steps} steps of task 2:")
    for name, times in parts.items():
        print(f"  {name:<18}{1000 * mean(times):9.1f} ms {100 * mean(times) / mean(full):6.1f} %")
    for name, times in (("whole step", full), ("bare network", bare)):
        print(f"  {name:<18}{1000 * mean(times):9.1f} ms {2 * size / mean(times):10.1f} views/s")
    print(f"  {'ratio':<18}{mean(bare) / mean(full):9.3f}")
    print(f"  {'peak memory':<18}{peak_memory(device):9.2f} GB")
    seconds = max(1, len(first.labels) // size) * c.epochs_first * (
        mean(full) - (mean(parts["teacher forward"]) if teacher is not None else 0))
    seconds += len(task.pool_labels) // size * c.epochs * mean(full) * (c.tasks - 1)
    print(f"  all {c.tasks} tasks with these settings: about {seconds / 3600:.1f} hours")


def peak_memory(device):
    """Gigabytes, of the CUDA device or else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    try:
        import resource
    except ImportError:                                     # Windows
        return math.nan
    unit = 1e9 if sys.platform == "darwin" else 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# ------------------------------------------------------------------------ command line

def main(argv):
    """Settle the settings, find what is wrong before anything is made, then train or profile."""
    flags = build_parser().parse_args(argv)
    c = settings(flags)
    if flags.resume and flags.init:
        raise Problem(f"--init {c.init} starts a run, --resume goes on with one: give one of them")
    if flags.resume:
        saved = vars(open_run(c.out)[0]) | {"out": c.out}
        c = settings(flags, saved, saved.keys() - {"resume", "profile"})
    elif flags.init:
        saved, finished = open_run(c.init)
        if not finished:
            raise Problem(f"--init {c.init}: that run has not finished its first task")
        inherit = vars(saved).keys() - SAME_RESULT - AFTER_TASK_1 | {"data_dir"}
        c = settings(flags, vars(saved), inherit)
    out, device = Path(c.out), pick_device(c.device)
    if out.exists() and not out.is_dir():
        raise Problem(f"--out {out} is a file, not a folder")
    held = [name for name in ("config.json", "last.pt", "task1.pt", "log.jsonl")
            if (out / name).exists()]
    if held and not flags.resume and not c.profile:
        raise Problem(f"{out} holds a run already ({held[0]}): go on with --resume, or choose "
                      "another --out")
    if c.amp and (device.type == "mps"
                  or device.type == "cuda" and not torch.cuda.is_bf16_supported(False)):
        raise Problem(f"--amp needs bfloat16, which {device} does not have: leave it out")
    if DATASETS[c.dataset]["classes"]:
        check(c, DATASETS[c.dataset]["classes"])
    if c.init and not (out / "last.pt").exists():
        load_task(Path(c.init) / "task1.pt", c, "cpu")      # a bad one is found before all else
    if c.compile:
        try:
            torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
        except Exception as error:                          # no compiler, mostly
            raise Problem(f"--compile fails here ({type(error).__name__}): leave it out") from None
    torch.backends.cudnn.benchmark = True                   # batches keep one shape
    torch.backends.cudnn.allow_tf32 = True                  # for convolutions; matrix products, the
    torch.set_float32_matmul_precision("highest")           # losses' too, stay in full float32
    data = load_data(c, device)
    c.classes = data.names
    check(c, len(c.classes))
    if c.profile:
        return profile(c, data, device, c.profile)

    print(f"{c.dataset}: {c.tasks} tasks of {len(data.tasks[0])} classes, {len(data.train_labels)} "
          f"training images, {c.plasticity} + {c.stability}, buffer {c.buffer}, seed {c.seed}, "
          f"{device}, in {out}", flush=True)
    go_on = f"python train.py --resume --out {out}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "log.jsonl", "*.pt"):
            for stale in out.glob(f"{name}.*.tmp"):         # `write` was killed
                stale.unlink()
        if not flags.resume:
            write(out / "config.json", json.dumps({
                "settings": vars(c), "torch": torch.__version__, "device": str(device),
                "python": platform.python_version(), "threads": torch.get_num_threads(),
            }, indent=1).encode())
        train(c, data, device, out)
    except KeyboardInterrupt:
        print(f"\nstopped; go on with: {go_on}")
        return 130
    except OSError as error:
        raise Problem(f"{out} cannot be written ({error}); what was saved before is whole: make "
                      f"room, then {go_on}") from None
    print(f"finished. Evaluate with: python eval.py {out}")


if __name__ == "__main__":
    command(main)
