"""Stage 1: learn tasks one after another with L = w L_FNC2 + v L_HSD (Eq. 6, where w = v = 1).

    python train.py                                  # drawn shapes: minutes on a CPU, no download
    python train.py --dataset cifar10 --buffer 0     # the paper's headline run: a GPU and hours
    python train.py --dataset cifar10 --plasticity supcon --stability ird      # Co2L
    torchrun --nproc-per-node 4 train.py ...         # the same run on four GPUs

Presets fill flags that are not given; w is --plasticity-weight (D9), v is --stability-weight. A run
folder holds config.json (settings), log.jsonl (a line per epoch), task<t>.pt (the state at the end
of task t) and last.pt (the latest state, for --resume); `python eval.py RUN` evaluates it.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from buffer import ReservoirBuffer
from data import DATASETS, UserError, augment, load, read, refuse, save, task_images, write
from etf import simplex_etf
from losses import fnc2_loss, hsd_alpha, hsd_loss, supcon_loss
from model import Encoder, frozen_copy

# The paper's appendix; width 64 is ResNet-18. A folder takes cifar100's; `shapes` is ours.
PAPER = dict(epochs_first=500, epochs=100, batch_size=512, lr=0.5, dim=128, width=64, gamma=1.0,
             tau=0.5, e0=30, kappa_past=0.01, kappa_current=0.2, zeta_past=0.01, zeta_current=0.2)
PRESETS = {
    "cifar10": PAPER,
    "cifar100": PAPER | dict(gamma=4.0, zeta_past=0.1),
    "tinyimagenet": PAPER | dict(epochs=50, lr=0.1, dim=256, gamma=4.0, e0=20,
                                 kappa_past=0.1, kappa_current=0.1, zeta_past=0.1),
    "shapes": PAPER | dict(epochs_first=16, epochs=8, batch_size=32, lr=0.06, dim=32, width=8, e0=3,
                           image_size=16, stability_weight=4.0),
}
SAVE_SECONDS = 300                              # at least so long between writes of last.pt inside a task
FREE = {"data_dir", "device", "compile", "out", "resume"}       # may change when a run is resumed
# torchrun starts WORLD processes that hold the same data and draw the same random numbers. Each
# encodes its share of the views; the embeddings are gathered and the loss is the whole batch's.
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# ------------------------------------------------------------------------ the method

def train_step(net, teacher, optimizer, x, y, *, prototypes, old, seen, alpha, c):
    """One step on 2N views with labels y (2N,); x is this process's share of them.

    Classes 0..old-1 are those of earlier tasks, 0..seen-1 those and this task's; c: the settings.
    Returns plasticity, stability and the norm of the mean embedding, without synchronising.
    """
    with torch.autocast(x.device.type, torch.bfloat16, enabled=c.amp):
        z = net(x)                                                              # (2N/WORLD, d)
        with torch.no_grad():
            z_past = None if teacher is None else teacher(x)                    # (2N/WORLD, d)
    z = gather(z)                                                               # (2N, d)

    anchors = y >= old                                      # views of buffer images are no anchors
    if c.plasticity == "fnc2":
        old_prototypes = prototypes[:old] if c.pseudo_replay else None          # P_1:t-1
        plasticity = fnc2_loss(z, y, prototypes, old_prototypes, anchors, tau=c.tau, gamma=c.gamma)
    else:
        plasticity = supcon_loss(z, y, anchors, tau=c.tau)
    stability = torch.zeros_like(plasticity)
    if teacher is not None:
        stability = hsd_loss(z, gather(z_past), prototypes[:seen], alpha,       # P_1:t
                             kappa_current=c.kappa_current, kappa_past=c.kappa_past,
                             zeta_current=c.zeta_current, zeta_past=c.zeta_past)
    loss = c.plasticity_weight * plasticity + c.stability_weight * stability    # Eq. 6

    optimizer.zero_grad()
    (loss * WORLD).backward()           # DistributedDataParallel averages; the shares must add up
    optimizer.step()
    return torch.stack([plasticity, stability, z.mean(0).norm()]).detach()


def gather(z):
    """All embeddings from the shares: (2N/WORLD, d) -> (2N, d); gradients flow to our share."""
    if WORLD == 1:
        return z
    parts = [torch.empty_like(z) for _ in range(WORLD)]
    dist.all_gather(parts, z.detach().contiguous())
    parts[RANK] = z
    return torch.cat(parts)


def learning_rate(progress, epochs, lr):
    """The rate at progress 0..1 of a task: cosine from lr to lr/1000, linear warm-up from 0.01.

    Warm-up takes 10 epochs, at most a tenth of the task; it starts at lr/10 if that is less.
    """
    cosine = lambda p: lr / 1000 + (lr - lr / 1000) * (1 + math.cos(math.pi * p)) / 2
    warm = min(10 / epochs, 0.1)
    if progress >= warm:
        return cosine(progress)
    start = min(0.01, lr / 10)
    return start + (cosine(warm) - start) * progress / warm


def train(c, data, device, out):
    """Learn all tasks, from the last.pt of `out` if there is one; momentum carries over tasks."""
    prototypes = simplex_etf(c.prototypes or len(data.names), c.dim, seed=c.seed).to(device)
    buffer = ReservoirBuffer(c.buffer, seed=seed_for(c.seed, "buffer"))
    net, state = load_net(out / "last.pt" if (out / "last.pt").exists() else None, c, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=c.lr, momentum=0.9, weight_decay=1e-4)
    finished, done, log = 0, 0, []              # tasks, epochs of the next task, lines of log.jsonl
    if state:
        finished, done, log = state["finished"], state["epoch"], state["log"]
        prototypes = state["prototypes"]        # --init: of a run with another seed
        optimizer.load_state_dict(state["optimizer"])
        if (finished, done) > (1, 0):           # until then a new one, also with --init
            buffer.load_state_dict(state["buffer"])
    recipe = data.recipe | {k: torch.tensor(data.recipe[k], device=device) for k in ("mean", "std")}
    compiled = torch.compile if c.compile else lambda module: module
    student = DistributedDataParallel(net, broadcast_buffers=False) if WORLD > 1 else net
    student, teacher, saved = compiled(student), None, time.monotonic()

    def save_state(name, finished, epoch):
        if RANK == 0:
            save(out / name, {
                "finished": finished, "epoch": epoch, "net": net.state_dict(), "log": log,
                "prototypes": prototypes, "optimizer": optimizer.state_dict(),
                "buffer": buffer.state_dict(), "generator": generator.get_state()})

    for t in range(finished + 1, c.tasks + 1):
        old, seen = data.tasks[t - 1][0], data.tasks[t - 1][-1] + 1
        epochs = c.epochs if t > 1 else c.epochs_first
        generator = torch.Generator().manual_seed(seed_for(c.seed, f"task {t}"))  # batches, views
        if done:                                            # resume inside this task
            generator.set_state(state["generator"].cpu())
        elif t > 1:
            buffer.add(*task_images(data, t - 1))           # each image of a task is offered once
        if t > 1 and c.stability != "none":
            teacher = compiled(frozen_copy(load_net(out / f"task{t - 1}.pt", c, device)[0]))
        images, labels = (torch.cat([new, held.to(device)]) for new, held in zip(
            task_images(data, t), (buffer.images, buffer.labels)))      # (n + m, 3, S, S), (n + m,)
        # An epoch is a new order of the pool, cut into equal batches; the rest is left out (D14).
        size = min(c.batch_size, len(labels) // WORLD * WORLD)
        share = slice(RANK * 2 * size // WORLD, (RANK + 1) * 2 * size // WORLD)
        steps = len(labels) // size

        for epoch in range(done + 1, epochs + 1):
            alpha = {"hsd": hsd_alpha(epoch, epochs, c.e0), "sprd": 1.0}.get(c.stability, 0.0)
            order = torch.randperm(len(labels), generator=generator).to(device)
            total, start = torch.zeros(3, device=device), time.perf_counter()
            for step in range(steps):
                rate = learning_rate((epoch - 1 + step / steps) / epochs, epochs, c.lr)
                optimizer.param_groups[0]["lr"] = rate
                batch = order[step * size:(step + 1) * size]
                x = augment(images[batch].repeat(2, 1, 1, 1), generator, share=share, **recipe)
                total += train_step(student, teacher, optimizer, x, labels[batch].repeat(2),
                                    prototypes=prototypes, old=old, seen=seen, alpha=alpha, c=c)
            plasticity, stability, norm = (total / steps).tolist()      # waits for the device
            seconds = time.perf_counter() - start
            log.append({"task": t, "epoch": epoch, "plasticity": plasticity, "stability": stability,
                        "mean_embedding": norm, "alpha": alpha * (t > 1), "lr": rate,
                        "seconds": seconds, "views_per_second": 2 * size * steps / seconds})
            report(log[-1], epochs, c)
            if RANK == 0:
                write(out / "log.jsonl", "".join(json.dumps(e) + "\n" for e in log).encode())
            if epoch < epochs and time.monotonic() - saved >= SAVE_SECONDS:
                save_state("last.pt", t - 1, epoch)
                saved = time.monotonic()
        save_state(f"task{t}.pt", t, 0)                     # with the buffer of task t (D13)
        save_state("last.pt", t, 0)
        done = 0
        if WORLD > 1:
            dist.barrier()                                  # all read the teacher from this file


def report(entry, epochs, c):
    """Print an epoch's losses, speed and the time left; stop if diverged, warn if collapsed."""
    t, epoch, loss, norm = (entry[k] for k in ("task", "epoch", "plasticity", "mean_embedding"))
    line = f"task {t}/{c.tasks}  epoch {epoch:>3}/{epochs}  {c.plasticity} {loss:.4f}"
    if t > 1 and c.stability != "none":
        line += f"  {c.stability} {entry['stability']:.4f}  alpha {entry['alpha']:.2f}"
    teacher = 4 / 3 if t == 1 and c.stability != "none" else 1     # later a forward more, of 3
    print(f"{line}  lr {entry['lr']:.4f}  {entry['views_per_second']:.0f} views/s  "
          f"{entry['seconds'] * (epochs - epoch + (c.tasks - t) * c.epochs * teacher) / 60:.1f} min"
          " left", flush=True)
    refuse(not math.isfinite(loss + entry["stability"]), f"the loss is not finite in task {t}, "
           f"epoch {epoch}: {c.plasticity} {loss}, {c.stability} {entry['stability']}; resuming "
           "would diverge again: start a new run with a smaller --lr")
    if epoch == epochs and norm > 0.99:
        print(f"warning: task {t} ends with all embeddings at one point (norm of their mean "
              f"{norm:.4f}): the network has collapsed; try a smaller --lr")


def load_net(file, c, device):
    """The network of a checkpoint, and all that the checkpoint holds; file None: a new network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(c.seed, "weights"))
        net = Encoder(c.width, c.dim)
    state = read(file, device) if file else None
    try:
        net.load_state_dict(state["net"] if file else net.state_dict())
    except (KeyError, RuntimeError, TypeError, AttributeError):
        raise UserError(f"{file} has no network of width {c.width} and dim {c.dim}") from None
    if WORLD > 1 and device.type == "cuda":                 # torch has it for CUDA only
        net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)
    return net.to(device, memory_format=torch.channels_last), state


def open_run(run):
    """Settings of a run (missing ones take their default), and task<t>.pt of finished tasks."""
    path, count = Path(run) / "config.json", len(list(Path(run).glob("task*.pt")))
    refuse(not path.is_file(), f"{run} is not a run: it has no config.json")
    files = [path.with_name(f"task{t}.pt") for t in range(1, count + 1)]
    try:
        saved = argparse.Namespace(**json.loads(path.read_text())["settings"])
        return settle(build_parser().parse_args([], saved)), files
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged: it does not hold the settings of a run") from None


def load_data(c, device):
    """The data of a run with settings `c`, on the device; classes and recipe belong to the run."""
    data = load(c.dataset, c.data_dir, tasks=c.tasks, image_size=c.image_size,
                limit_per_class=c.limit_per_class, val_fraction=c.val_fraction, seed=c.seed)
    refuse(c.classes not in (None, data.names), f"{c.data_dir} has other classes than the run")
    tensors = {k: v.to(device) for k, v in data._asdict().items() if isinstance(v, torch.Tensor)}
    return data._replace(**tensors, recipe=c.recipe or data.recipe)


def seed_for(seed, purpose):
    """Independent random streams from one --seed, for weights, buffer and the batches of a task."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:7], "big")


# ------------------------------------------------------------------------ command line

def build_parser():
    """Every setting of a run, with its default (None: the preset's) and its meaning."""
    parser = argparse.ArgumentParser("train.py", "python train.py [flags], --help lists them",
                                     __doc__.split("\n")[0], allow_abbrev=False)
    parser.set_defaults(classes=None, recipe=None, processes=WORLD)     # not flags; in config.json

    def flag(name, kind, default, text):
        how = ({"action": argparse.BooleanOptionalAction} if kind is bool else
               {"choices": kind} if isinstance(kind, list) else {"type": kind, "metavar": "X"})
        group.add_argument(name, default=default, help=text, **how)

    group = parser.add_argument_group("data")
    flag("--dataset", list(DATASETS), "shapes", "(shapes)")
    flag("--data-dir", str, "data", "where datasets are, or are downloaded to (data)")
    flag("--tasks", int, None, "number of tasks (the dataset's own); 1 is joint training")
    flag("--buffer", int, 0, "images kept of old tasks; paper: 0, 200, 500 (0)")
    flag("--image-size", int, None, "resize images, once (the dataset's)")
    flag("--limit-per-class", int, None, "use the first X training images of each class")
    flag("--val-fraction", float, 0.0, "hold out for eval.py --split val (0)")
    group = parser.add_argument_group("method; the paper's values are the presets")
    flag("--plasticity", ["fnc2", "supcon"], "fnc2", "loss of the current task (fnc2)")
    flag("--stability", ["hsd", "ird", "sprd", "none"], "hsd", "distillation, from task 2 on (hsd)")
    flag("--pseudo-replay", bool, True, "old prototypes in FNC2's denominator (on)")
    flag("--plasticity-weight", float, None, "(tau/0.07, as the authors' code; paper's formula: 1)")
    flag("--stability-weight", float, None, "(1, as in the paper; shapes: 4)")
    flag("--gamma", float, None, "focus of FNC2; paper: 1 (cifar10), 4")
    flag("--tau", float, None, "temperature of the plasticity loss; paper: 0.5")
    flag("--e0", int, None, "epochs of IRD alone in each task; paper: 30 of 100 (that share)")
    flag("--kappa-past", float, None, "IRD, teacher; paper: 0.01, 0.1 (tinyimagenet)")
    flag("--kappa-current", float, None, "IRD, student; paper: 0.2, 0.1 (tinyimagenet)")
    flag("--zeta-past", float, None, "S-PRD, teacher; paper: 0.01 (cifar10), 0.1")
    flag("--zeta-current", float, None, "S-PRD, student; paper: 0.2")
    group = parser.add_argument_group("training")
    flag("--seed", int, 0, "(0)")
    flag("--epochs-first", int, None, "of task 1; paper: 500")
    flag("--epochs", int, None, "of each later task; paper: 100, 50 (tinyimagenet)")
    flag("--batch-size", int, None, "images, two views each; paper: 512")
    flag("--lr", float, None, "paper: 0.5, 0.1 (tinyimagenet)")
    flag("--dim", int, None, "of embeddings; paper: 128, 256 (tinyimagenet)")
    flag("--width", int, None, "of the network; paper: 64, which is ResNet-18")
    flag("--prototypes", int, None, "fixed in advance (as many as classes)")
    group = parser.add_argument_group("running")
    flag("--device", str, "auto", "auto, cpu, cuda, cuda:1, mps (auto)")
    flag("--amp", bool, False, "bfloat16 autocast around the networks (off)")
    flag("--compile", bool, False, "torch.compile the networks (off)")
    flag("--out", str, None, "run folder (runs/<dataset>-buffer<N>-seed<S>)")
    flag("--resume", bool, False, "continue the run in --out, with its settings (off)")
    flag("--init", str, None, "start at task 2 from the task1.pt of a run with the same network")
    return parser


def settle(c):
    """Check the ranges, and fill what the flags left unset from the dataset's preset."""
    at_least(c, tasks=1, buffer=0, image_size=4, limit_per_class=1, val_fraction=0, seed=0, width=8,
             plasticity_weight=0, stability_weight=0, gamma=0, e0=0, epochs_first=1, epochs=1,
             batch_size=2, dim=1, prototypes=2, lr=1e-6, tau=1e-6, kappa_past=1e-6,
             kappa_current=1e-6, zeta_past=1e-6, zeta_current=1e-6)
    preset, of = PRESETS.get(c.dataset, PRESETS["cifar100"]), DATASETS[c.dataset]
    filled = {"tasks": of["tasks"], "image_size": of["size"], "stability_weight": 1.0} | preset | {
        "e0": round(preset["e0"] * (c.epochs or preset["epochs"]) / preset["epochs"]),  # its share
        "plasticity_weight": (c.tau or preset["tau"]) / 0.07,
        "out": f"runs/{c.dataset}-buffer{c.buffer}-seed{c.seed}"}
    return argparse.Namespace(**{key: filled.get(key) if value is None else value
                                 for key, value in vars(c).items()})


def at_least(settings, **lowest):
    """No number is below its lowest value, infinite or nan; None is unset."""
    for key, low in lowest.items():
        value = getattr(settings, key)
        refuse(value is not None and not low <= value < math.inf,
               f"--{key.replace('_', '-')} {value} must be at least {low}")


def parse(argv):
    """The settings of a run from its flags; --resume keeps those of the run."""
    c = settle(build_parser().parse_args(argv))
    if c.resume:
        saved = vars(open_run(c.out)[0]) | {"out": c.out}
        refuse(saved["plasticity"] not in ("fnc2", "supcon"), f"{c.out} is not a run of train.py")
        c = build_parser().parse_args(argv, argparse.Namespace(**saved))
        for key in saved.keys() - FREE:
            refuse(getattr(c, key) != saved[key], f"--{key.replace('_', '-')} {getattr(c, key)}: "
                   f"the run has {saved[key]}; leave the flag out, or start a new run")
    refuse(c.tasks is None, f"--tasks is needed with --dataset {c.dataset}")
    return c


def pick_device(name):
    """--device as a torch.device with its number; auto: the accelerator, if there is one."""
    if name == "auto":
        name = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    if WORLD > 1 and str(name) == "cuda":
        name = f"cuda:{os.environ['LOCAL_RANK']}"           # one GPU for each process
    try:
        device = torch.empty(0, device=name).device         # cuda becomes cuda:0
    except (RuntimeError, AssertionError):                  # unknown, or not in this torch
        raise UserError(f"--device {name} is not available") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def main(argv):
    """Find what is wrong before anything is written, make the run folder, then train."""
    c = parse(argv)
    out, device = Path(c.out), pick_device(c.device)
    refuse(c.batch_size % WORLD, f"--batch-size {c.batch_size} is no multiple of {WORLD} processes")
    refuse(c.stability == "hsd" and c.e0 >= c.epochs, f"--e0 {c.e0} of --epochs {c.epochs} leaves "
           "no epoch for S-PRD: choose a smaller --e0, or --stability ird")
    refuse(any(p.is_file() for p in (out, *out.parents)), f"--out {out} is a file, not a folder")
    refuse(not c.resume and (any(out.glob("*.pt")) or (out / "config.json").exists()),
           f"{out} holds a run: continue it with --resume, or choose another --out")
    refuse(c.processes != WORLD and device.type != "cuda", f"resume with {c.processes} processes, "
           f"not {WORLD}: on the CPU their number changes the BatchNorm")
    init = load_net(c.init, c, device)[1] if c.init and not c.resume else None
    torch.backends.cudnn.benchmark = True                   # batches keep one shape
    if WORLD > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")
        dist.barrier()                                      # rank 0 loads first: it may download
    data = load_data(c, device)
    classes, count = len(data.names), c.prototypes or len(data.names)
    refuse(not classes <= count <= c.dim + 1, f"{count} prototypes do not fit: at least {classes} "
           f"(--prototypes, one for each class) and at most {c.dim + 1} (--dim + 1)")
    refuse(init and (init.get("finished"), len(init.get("prototypes", []))) != (1, count),
           f"--init {c.init} is not the task1.pt of a run with {count} prototypes")
    if RANK == 0 and not c.resume:
        c.classes, c.recipe = data.names, data.recipe
        out.mkdir(parents=True, exist_ok=True)
        for name in ("task1.pt", "last.pt") if init else ():
            write(out / name, Path(c.init).read_bytes())
        config = {"settings": vars(c), "torch": torch.__version__, "device": str(device),
                  "python": sys.version, "threads": torch.get_num_threads()}
        write(out / "config.json", json.dumps(config, indent=1).encode())
    if RANK == 0 and WORLD > 1:
        dist.barrier()
    print(f"{c.dataset}: {c.tasks} tasks of {len(data.tasks[0])} classes, {len(data.train_labels)} "
          f"training images, {c.plasticity} + {c.stability}, buffer {c.buffer}, seed {c.seed}, "
          f"{device}\nin {out}; after an interruption: python train.py --resume --out {out}")
    train(c, data, device, out)
    if WORLD > 1:
        dist.destroy_process_group()
    print(f"finished. Evaluate with: python eval.py {out}")


def command(main):
    """Run main(argv) as a program; user errors: one line, exit status 2."""
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        time.sleep(10 if RANK else 0)                       # rank 0 prints it, torchrun stops us
        message, status = f"error: {error}", 2
    except (KeyboardInterrupt, BrokenPipeError) as stop:    # Ctrl-C; `python train.py | head -1`
        sys.stdout = open(os.devnull, "w")
        message, status = f"stopped ({type(stop).__name__})", 130
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    command(main)
