"""Stage 1: learn a sequence of tasks with L = L_FNC2 + L_HSD (Eq. 6), one after the other.

    python train.py                                     # drawn shapes, minutes on a laptop, no download
    python train.py --dataset cifar10 --buffer 0        # the paper's headline run (a GPU and hours)
    python train.py --dataset cifar10 --plasticity supcon --stability ird       # Co2L

What a flag leaves unset is filled by the dataset's preset below. A run folder holds config.json, log.jsonl (a line
per epoch), task<t>.pt (network, prototypes, the buffer that task t was trained with) and last.pt (everything
needed to go on with --resume). `python eval.py RUN` evaluates it.
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
from data import DATASETS, Problem, augment, normalise, read, save, write
from etf import simplex_etf
from eval import accuracies, command, encode, load_data, number, open_run, pick_device
from losses import fnc2_loss, hsd_alpha, hsd_loss, supcon_loss
from model import Encoder, frozen_copy

# The paper's appendix, Table 7. Width 64 is ResNet-18. `folder` takes cifar100's values; `shapes` is ours.
PAPER = dict(epochs_first=500, epochs=100, batch_size=512, lr=0.5, dim=128, width=64, gamma=1.0, tau=0.5, e0=30,
             kappa_past=0.01, kappa_current=0.2, zeta_past=0.01, zeta_current=0.2)
PRESETS = {
    "cifar10": PAPER,
    "cifar100": PAPER | dict(gamma=4.0, zeta_past=0.1),
    "tinyimagenet": PAPER | dict(epochs=50, lr=0.1, dim=256, gamma=4.0, e0=20, kappa_past=0.1, kappa_current=0.1,
                                 zeta_past=0.1),
    "folder": PAPER | dict(gamma=4.0, zeta_past=0.1),
    "shapes": PAPER | dict(epochs_first=30, epochs=15, batch_size=32, lr=0.01, width=8, dim=32, e0=4),
}
FREE = {"device", "compile", "out", "resume", "init", "data_dir", "save_every", "profile"}   # do not change the result
LATER = {"buffer", "stability", "stability_weight", "pseudo_replay", "epochs", "e0", "kappa_past", "kappa_current",
         "zeta_past", "zeta_current"}                                                        # do not change task 1


# ---------------------------------------------------------------------------- settings

def build_parser():
    """Every flag defaults to None, so that presets and saved settings fill only what the user left unset."""
    p = argparse.ArgumentParser(prog="train.py", allow_abbrev=False, usage="python train.py [flags]  (--help lists them)",
                                description=__doc__.split("\n\n")[0], argument_default=None)
    g = p.add_argument_group("data")
    g.add_argument("--dataset", choices=list(DATASETS), help="(shapes)")
    g.add_argument("--data-dir", metavar="DIR", help="where datasets are, or are downloaded to (data)")
    g.add_argument("--tasks", type=number(int, 1, 10**6), help="number of tasks (the dataset's own); 1 is joint training")
    g.add_argument("--buffer", type=number(int, 0, 10**7), help="images kept of old tasks; paper: 0, 200, 500 (0)")
    g.add_argument("--image-size", type=number(int, 4, 1024), help="resize all images once (the dataset's own)")
    g.add_argument("--limit-per-class", type=number(int, 1, 10**7), metavar="N", help="use the first N training images of a class")
    g.add_argument("--val-fraction", type=number(float, 0, 0.9), metavar="F",
                   help="hold out this part of the training images for eval.py --split val (0)")
    g = p.add_argument_group("method (the paper's values are the presets)")
    g.add_argument("--plasticity", choices=["fnc2", "supcon"], help="loss of the current task (fnc2)")
    g.add_argument("--stability", choices=["hsd", "ird", "sprd", "none"], help="distillation from task 2 on (hsd)")
    g.add_argument("--no-pseudo-replay", dest="pseudo_replay", action="store_false", help="no old prototypes in FNC2's denominators")
    positive = number(float, 0, 1000, above=True)
    g.add_argument("--plasticity-weight", type=number(float, 0, 1000), help="(tau/0.07, as Co2L's code; the paper's formula: 1)")
    g.add_argument("--stability-weight", type=number(float, 0, 1000), help="(1)")
    g.add_argument("--gamma", type=number(float, 0, 100), help="focus of FNC2; paper: 1 (cifar10), 4")
    g.add_argument("--tau", type=positive, help="temperature of the plasticity loss; paper: 0.5")
    g.add_argument("--e0", type=number(int, 0, 10**6), help="epochs of IRD alone; paper: 30 of 100, scaled with --epochs if unset")
    g.add_argument("--kappa-past", type=positive, help="IRD temperature, teacher; paper: 0.01, 0.1 (tinyimagenet)")
    g.add_argument("--kappa-current", type=positive, help="IRD temperature, student; paper: 0.2, 0.1 (tinyimagenet)")
    g.add_argument("--zeta-past", type=positive, help="S-PRD temperature, teacher; paper: 0.01 (cifar10), 0.1")
    g.add_argument("--zeta-current", type=positive, help="S-PRD temperature, student; paper: 0.2")
    g = p.add_argument_group("training")
    g.add_argument("--seed", type=number(int, 0, 2**31), help="(0)")
    g.add_argument("--epochs-first", type=number(int, 1, 10**6), help="epochs of task 1; paper: 500")
    g.add_argument("--epochs", type=number(int, 1, 10**6), help="epochs of later tasks; paper: 100, 50 (tinyimagenet)")
    g.add_argument("--batch-size", type=number(int, 1, 10**6), help="images, two views each; paper: 512")
    g.add_argument("--lr", type=positive, help="paper: 0.5, 0.1 (tinyimagenet)")
    g.add_argument("--dim", type=number(int, 1, 10**5), help="of the embeddings; paper: 128, 256 (tinyimagenet)")
    g.add_argument("--width", type=number(int, 1, 1024), help="of the network; paper: 64, which is ResNet-18")
    g.add_argument("--prototypes", type=number(int, 2, 10**5), help="how many are fixed in advance (one per class)")
    g = p.add_argument_group("running")
    g.add_argument("--device", help="auto, cpu, cuda, cuda:1, mps (auto)")
    g.add_argument("--amp", action="store_true", help="bfloat16 autocast around the encoder")
    g.add_argument("--compile", action="store_true", help="torch.compile the encoder")
    g.add_argument("--out", metavar="RUN", help="run folder (runs/<dataset>-buffer<N>-seed<S>)")
    g.add_argument("--resume", action="store_true", help="go on with the run in --out, with its settings")
    g.add_argument("--init", metavar="RUN", help="take task 1 from this run, with its task-1 settings, and start at task 2")
    g.add_argument("--save-every", type=number(int, 1, 10**6), metavar="N", help="epochs between writings of last.pt (1)")
    g.add_argument("--profile", type=number(int, 1, 10**5), metavar="STEPS", help="time that many steps of task 2, write nothing")
    p.set_defaults(pseudo_replay=None, amp=None, compile=None, resume=None)
    return p


def settings(flags, saved=None, inherit=()):
    """All settings of a run: the user's flags, then what the saved run has (keys in `inherit`), then the presets."""
    given = {key: value for key, value in vars(flags).items() if value is not None}
    kept = {key: saved[key] for key in inherit if key in saved} if saved else {}
    for key in kept:
        if key in given and given[key] != kept[key]:
            flag = "--no-pseudo-replay" if key == "pseudo_replay" else f"--{key.replace('_', '-')} {given[key]}"
            raise Problem(f"{flag}, the run has {kept[key]}: leave the flag out, or start a run of its own")
    given = kept | given
    name = given.get("dataset", "shapes")
    c = dict(dataset=name, data_dir="data", buffer=0, tasks=DATASETS[name]["tasks"], image_size=DATASETS[name]["size"],
             limit_per_class=None, val_fraction=0.0, seed=0, plasticity="fnc2", stability="hsd", pseudo_replay=True,
             stability_weight=1.0, prototypes=None, device="auto", amp=False, compile=False, resume=False, init=None,
             save_every=1, profile=None)
    c |= PRESETS[name] | given
    if "e0" not in given:                           # the preset's share of the epochs that there are now
        c["e0"] = round(PRESETS[name]["e0"] * c["epochs"] / PRESETS[name]["epochs"])
    c.setdefault("plasticity_weight", c["tau"] / 0.07)
    c.setdefault("out", f"runs/{name}-buffer{c['buffer']}-seed{c['seed']}")
    return SimpleNamespace(**c)


def check(c, num_classes):
    """Settings that contradict each other or the data."""
    count = c.prototypes or num_classes
    if c.tasks and num_classes % c.tasks:
        raise Problem(f"--tasks {c.tasks} does not divide the {num_classes} classes into tasks of equal size")
    if count < num_classes:
        raise Problem(f"--prototypes {count} are fewer than the {num_classes} classes")
    if c.dim < count - 1:
        raise Problem(f"--dim {c.dim} is too small for {count} prototypes: at least {count - 1}")
    if c.stability == "hsd" and c.e0 >= c.epochs and c.epochs > 1:
        raise Problem(f"--e0 {c.e0} of --epochs {c.epochs} leaves no epoch for S-PRD: choose a smaller --e0, or --stability ird")
    if c.init and c.tasks == 1:
        raise Problem(f"--init {c.init} skips task 1, but --tasks 1 has no other")
    if c.profile and c.tasks == 1:
        raise Problem(f"--profile {c.profile} times the second task, but --tasks 1 has only one")


def seed_for(seed, purpose):
    """Independent streams from one --seed: changing what one of them draws moves none of the others."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:7], "big")


# ---------------------------------------------------------------------------- training

def learning_rate(progress, epochs, lr):
    """The rate at progress 0..1 of a task: cosine from lr to lr/1000, after a linear warm-up from 0.01.

    Warm-up takes 10 epochs, at most a tenth of the task; it starts at lr/10 where that is below 0.01.
    """
    cosine = lambda p: lr / 1000 + (lr - lr / 1000) * (1 + math.cos(math.pi * p)) / 2
    warm = min(10 / epochs, 0.1)
    if progress >= warm:
        return cosine(progress)
    start = min(0.01, lr / 10)
    return start + (cosine(warm) - start) * progress / warm


def train_step(images, labels, task, net, teacher, optimizer, c, generator, alpha, tick=lambda name: None):
    """One step on N images: the plasticity and stability losses, as tensors that nobody has waited for."""
    x = torch.cat([augment(images, generator, **task.views) for _ in range(2)])         # (2N, 3, S, S)
    y = labels.repeat(2)                                                                # (2N,)
    tick("augmentation")
    with torch.autocast(x.device.type, torch.bfloat16, enabled=c.amp):
        z = net(x)                                                                      # (2N, d)
        tick("student forward")
        if teacher:
            with torch.no_grad():
                z_past = teacher(x)                                                     # (2N, d)
            tick("teacher forward")

    current = y >= task.first                       # only views of the current task are anchors
    if c.plasticity == "fnc2":
        old = task.prototypes[:task.first] if c.pseudo_replay and task.first else None  # P_1:t-1
        plasticity = fnc2_loss(z, y, task.prototypes, old, current, tau=c.tau, gamma=c.gamma)
    else:
        plasticity = supcon_loss(z, y, current, tau=c.tau)
    stability = torch.zeros_like(plasticity)
    if teacher:
        stability = hsd_loss(z, z_past, task.prototypes[:task.seen], alpha,             # P_1:t
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


def make_net(c, device):
    """The network with weights drawn from their own stream."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(c.seed, "weights"))
        net = Encoder(c.width, c.dim)
    return net.to(device, memory_format=torch.channels_last)


def make_optimizer(net, c):
    return torch.optim.SGD(net.parameters(), lr=c.lr, momentum=0.9, weight_decay=1e-4)


def make_task(data, t, buffer, prototypes):
    """Task t = 1..T: its images and the buffer's in one pool, and which classes are old."""
    classes = data.tasks[t - 1]
    mine = (data.train_labels >= classes[0]) & (data.train_labels <= classes[-1])
    images, labels = data.train_images[mine], data.train_labels[mine]
    return SimpleNamespace(
        number=t, first=classes[0], seen=classes[-1] + 1, prototypes=prototypes, views=data.views, images=images, labels=labels,
        pool_images=torch.cat([images, buffer.images.to(images.device)]),
        pool_labels=torch.cat([labels, buffer.labels.to(images.device)]))


def train_epoch(epoch, epochs, task, net, teacher, optimizer, c, generator):
    """Epoch 1..epochs of a task: a dictionary for the log. The losses are read here, once, at its end.

    Every epoch is a new random order of the pool, cut into batches of one size; the images left over at its end (fewer
    than a batch) sit this epoch out. A pool smaller than a batch is one batch.
    """
    device, n = task.pool_labels.device, len(task.pool_labels)
    size = min(c.batch_size, n)
    steps = n // size
    alpha = {"hsd": hsd_alpha(epoch, epochs, c.e0), "ird": 0.0, "sprd": 1.0, "none": 0.0}[c.stability]
    order = torch.randperm(n, generator=generator).to(device)
    total, start, shown = torch.zeros(2, device=device), time.perf_counter(), 0.0
    for step in range(steps):
        rate = learning_rate((epoch - 1 + step / steps) / epochs, epochs, c.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = order[step * size:(step + 1) * size]
        total += train_step(task.pool_images[batch], task.pool_labels[batch], task, net, teacher, optimizer, c, generator, alpha)
        if sys.stdout.isatty() and time.perf_counter() - shown > 0.5:
            shown = time.perf_counter()
            print(f"\r  task {task.number} epoch {epoch}/{epochs} step {step + 1}/{steps} "
                  f"{2 * size * (step + 1) / (shown - start):.0f} views/s ", end="", flush=True)
    plasticity, stability = (total / steps).tolist()                # the first time that the host waits for the device
    seconds = time.perf_counter() - start
    return {"task": task.number, "epoch": epoch, "plasticity": plasticity, "stability": stability, "alpha": alpha, "lr": rate,
            "views_per_second": 2 * size * steps / seconds, "seconds": seconds}


def epoch_line(entry, c, epochs, seconds_left):
    stability = "" if entry["task"] == 1 or c.stability == "none" else f"  {c.stability} {entry['stability']:.4f}"
    alpha = f"  alpha {entry['alpha']:.2f}" if stability and c.stability == "hsd" else ""
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    left = time.strftime("%H:%M:%S", time.gmtime(seconds_left % 86400))
    days = f"{int(seconds_left // 86400)} d " if seconds_left >= 86400 else ""
    return (f"{clear}task {entry['task']}/{c.tasks}  epoch {entry['epoch']:>3}/{epochs}  {c.plasticity} {entry['plasticity']:.4f}{stability}"
            f"{alpha}  lr {entry['lr']:.4f}  {entry['views_per_second']:.0f} views/s  {days}{left} left")


def check_finite(entry, c, out):
    if not math.isfinite(entry["plasticity"] + entry["stability"]):
        raise Problem(f"the loss is not finite in task {entry['task']}, epoch {entry['epoch']}: {c.plasticity} {entry['plasticity']}, "
                      f"{c.stability} {entry['stability']}. {out}/last.pt is of the epoch before. A smaller --lr usually helps, "
                      "or a smaller --plasticity-weight; then start a run of its own")


def warn_if_collapsed(entry, task, c):
    """A contrastive loss at the value of equal similarities, ln(2N-1 + old prototypes), has learned nothing."""
    others = 2 * min(c.batch_size, len(task.pool_labels)) - 1
    others += task.first if c.plasticity == "fnc2" and c.pseudo_replay else 0
    chance = math.log(others)
    if c.plasticity == "fnc2":
        chance *= (1 - 1 / others) ** c.gamma
    if others > 1 and task.seen > 1 and entry["plasticity"] > 0.99 * chance:
        print(f"warning: task {task.number} ends with {c.plasticity} {entry['plasticity']:.4f}, chance is {chance:.4f}: the network has "
              "probably collapsed or not begun to learn; a smaller --lr, or more epochs, usually helps", flush=True)


def report_task(net, data, c, task):
    """Nearest-prototype accuracy on the tasks so far: no classifier, no stored image. Never on test images while choosing."""
    split = "validation" if c.val_fraction else "test"
    images, labels = (data.val_images, data.val_labels) if c.val_fraction else (data.test_images, data.test_labels)
    shown = labels < task.seen
    _, z = encode(net, images[shown], lambda x: normalise(x, data.views["mean"], data.views["std"]))
    class_il, task_il = accuracies(z @ task.prototypes[:task.seen].T, labels[shown], data.tasks[:task.number])
    print(f"task {task.number} done. Nearest prototype on {split} images: Class-IL {sum(class_il) / len(class_il):.1f} %, "
          f"Task-IL {sum(task_il) / len(task_il):.1f} %", flush=True)


def train(c, data, device, out):
    """The task loop, from wherever the run in `out` stands."""
    prototypes = simplex_etf(c.prototypes or data.tasks[-1][-1] + 1, c.dim, seed=c.seed).to(device)
    net = make_net(c, device)
    buffer = ReservoirBuffer(c.buffer, seed=seed_for(c.seed, "buffer"))
    state = read(out / "last.pt", device) if (out / "last.pt").exists() else None
    if state:
        net.load_state_dict(state["net"])
        buffer.load_state_dict(state["buffer"])
    forward = torch.compile(net) if c.compile else net
    log = trim_log(out, state)
    for t in range(state["task"] if state else 1, c.tasks + 1):
        task = make_task(data, t, buffer, prototypes)
        epochs = c.epochs_first if t == 1 else c.epochs
        if t == 1 and c.init:
            net.load_state_dict(read(Path(c.init) / "task1.pt", device)["net"])
            epochs = 0
        teacher = frozen_copy(net) if t > 1 and c.stability != "none" else None
        optimizer = make_optimizer(net, c)
        generator = torch.Generator().manual_seed(seed_for(c.seed, f"task {t}"))        # batches and views
        done, entry = 0, None
        if state:                                   # in the middle of this task, or at its very end
            done, entry = state["epoch"], state["entry"]
            optimizer.load_state_dict(state["optimizer"])
            generator.set_state(state["generator"].cpu())
            if teacher:
                teacher.load_state_dict(state["teacher"])
            state = None
        net.train()
        for epoch in range(done + 1, epochs + 1):
            entry = train_epoch(epoch, epochs, task, forward, teacher, optimizer, c, generator)
            check_finite(entry, c, out)
            log.write(json.dumps(entry) + "\n")
            log.flush()
            views_left = (epochs - epoch) * len(task.pool_labels) + (c.tasks - t) * c.epochs * (len(task.labels) + c.buffer)
            print(epoch_line(entry, c, epochs, 2 * views_left / entry["views_per_second"]), flush=True)
            if epoch % c.save_every == 0 or epoch == epochs:
                save(out / "last.pt", {
                    "settings": vars(c), "task": t, "epoch": epoch, "entry": entry, "net": net.state_dict(), "prototypes": prototypes,
                    "teacher": teacher.state_dict() if teacher else None, "optimizer": optimizer.state_dict(),
                    "buffer": buffer.state_dict(), "generator": generator.get_state()})
        save(out / f"task{t}.pt", {"settings": vars(c), "task": t, "net": net.state_dict(), "prototypes": prototypes,
                                   "buffer": buffer.state_dict()})
        if entry:
            warn_if_collapsed(entry, task, c)
        report_task(net, data, c, task)
        buffer.add(task.images, task.labels)        # every image of the finished task is offered once
    log.close()


def trim_log(out, state):
    """log.jsonl, open for appending, without the lines of epochs after the checkpoint that the run goes on from."""
    path, lines = out / "log.jsonl", []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):               # a line cut short by a kill
                entry = json.loads(line)
                if state and (entry["task"], entry["epoch"]) <= (state["task"], state["epoch"]):
                    lines.append(line + "\n")
        write(path, "".join(lines).encode())
    return open(path, "a")


# ---------------------------------------------------------------------------- profile

def profile(c, data, device, steps):
    """Time `steps` steps of the second task, each followed by the bare network on a ready batch; print where the time goes."""
    def now():
        if device.type in ("cuda", "mps"):
            getattr(torch, device.type).synchronize()
        return time.perf_counter()

    prototypes = simplex_etf(c.prototypes or data.tasks[-1][-1] + 1, c.dim, seed=c.seed).to(device)
    net, buffer = make_net(c, device), ReservoirBuffer(c.buffer)
    first = make_task(data, 1, buffer, prototypes)
    buffer.add(first.images, first.labels)
    task, teacher, optimizer = make_task(data, 2, buffer, prototypes), frozen_copy(net), make_optimizer(net, c)
    teacher = teacher if c.stability != "none" else None
    forward, generator = torch.compile(net) if c.compile else net, torch.Generator().manual_seed(0)
    optimizer.param_groups[0]["lr"] = 0.0                       # time does not depend on it, and nothing can diverge
    size = min(c.batch_size, len(task.pool_labels))
    images, labels = task.pool_images[:size], task.pool_labels[:size]
    ready = torch.cat([augment(images, generator, **task.views) for _ in range(2)])
    parts, full, bare = {}, [], []

    def tick(name):
        nonlocal last
        parts.setdefault(name, []).append(now() - last)
        last = now()

    for step in range(steps + 2):
        begin = last = now()
        train_step(images, labels, task, forward, teacher, optimizer, c, generator, 0.5, tick)
        full.append(now() - begin)
        begin = now()
        with torch.autocast(device.type, torch.bfloat16, enabled=c.amp):
            z = forward(ready)
            if teacher:
                with torch.no_grad():
                    teacher(ready)
        optimizer.zero_grad()
        z.sum().backward()
        optimizer.step()
        bare.append(now() - begin)
    mean = lambda times: sum(times[2:]) / steps                 # the first two steps warm up
    print(f"{device}, {torch.get_num_threads()} threads, width {c.width}, {size} images a batch, {task.pool_images.shape[-1]} pixels, "
          f"{steps} steps of task 2, mean:")
    for name, times in parts.items():
        print(f"  {name:<18}{1000 * mean(times):9.1f} ms {100 * mean(times) / mean(full):6.1f} %")
    print(f"  {'whole step':<18}{1000 * mean(full):9.1f} ms        {2 * size / mean(full):8.1f} views/s")
    print(f"  {'bare network':<18}{1000 * mean(bare):9.1f} ms        {2 * size / mean(bare):8.1f} views/s")
    print(f"  ratio             {mean(bare) / mean(full):9.3f}")
    print(f"  peak memory       {peak_memory(device):9.2f} GB")
    teacher_time = mean(parts["teacher forward"]) if teacher else 0.0
    hours = sum(len(make_task(data, t, buffer, prototypes).pool_labels) // size * (c.epochs if t > 1 else c.epochs_first)
                * (mean(full) - (teacher_time if t == 1 else 0)) for t in range(1, c.tasks + 1)) / 3600
    print(f"  all {c.tasks} tasks with these settings: about {hours:.1f} hours")


def peak_memory(device):
    """Gigabytes: of the CUDA device, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    import resource                                             # not on Windows
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)


# ---------------------------------------------------------------------------- command line

def main(argv):
    flags = build_parser().parse_args(argv)
    if flags.resume and flags.init:
        raise Problem(f"--init {flags.init} starts a run and --resume goes on with one: give only one of them")
    c = settings(flags)
    if flags.resume:
        saved = vars(open_run(c.out)[0])
        c = settings(flags, saved, saved.keys() - FREE | {"init", "out"})
    elif flags.init:
        saved, files = open_run(flags.init)
        if not files:
            raise Problem(f"--init {flags.init}: that run has not finished its first task")
        c = settings(flags, vars(saved), vars(saved).keys() - FREE - LATER)
    out, device = Path(c.out), pick_device(c.device)
    if not flags.resume and not c.profile and (out / "config.json").exists():
        raise Problem(f"{out} holds a run already: go on with --resume, or choose another --out")
    if c.amp and (device.type == "mps" or device.type == "cuda" and not torch.cuda.is_bf16_supported()):
        raise Problem(f"--amp needs bfloat16, which {device} does not have")
    if DATASETS[c.dataset]["classes"]:
        check(c, DATASETS[c.dataset]["classes"])
    torch.set_float32_matmul_precision("high")                  # TF32 where there is TF32
    data = load_data(c, device)
    check(c, data.tasks[-1][-1] + 1)
    if c.profile:
        return profile(c, data, device, c.profile)

    out.mkdir(parents=True, exist_ok=True)
    if not flags.resume:
        write(out / "config.json", json.dumps({
            "settings": vars(c), "torch": torch.__version__, "python": platform.python_version(),
            "device": str(device), "threads": torch.get_num_threads()}, indent=1).encode())
    go_on = f"python train.py --resume --out {out}"
    print(f"{c.dataset}: {len(data.tasks)} tasks of {len(data.tasks[0])} classes, {len(data.train_labels)} training images, "
          f"{c.plasticity} + {c.stability}, buffer {c.buffer}, seed {c.seed}, {device}, in {out}", flush=True)
    try:
        train(c, data, device, out)
    except KeyboardInterrupt:
        print(f"\nstopped; go on with: {go_on}")
        return 130
    except OSError as error:
        raise Problem(f"{out} cannot be written ({error}); what was saved before is whole: make room, then {go_on}") from None
    print(f"finished. Evaluate with: python eval.py {out}")


if __name__ == "__main__":
    command(main)
