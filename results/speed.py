"""Speed, measured beside a reference in the same run; memory and work, counted.

    python results/speed.py profile [train's flags]     # parts of a training step of task 2
    python results/speed.py losses                      # beside SupCon
    python results/speed.py probe RUN                   # seconds of the two readouts
    python results/speed.py memory [--check]            # of each preset, and the work of a run

memory counts on fake tensors, on any machine, within a minute; --check measures a small step too.
"""

import argparse
import ctypes
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import eval as evaluation
import train
from buffer import ReservoirBuffer
from data import DATASETS, augment, refuse, task_images
from etf import simplex_etf
from losses import fnc2_loss, hsd_loss, supcon_loss
from model import Encoder, frozen_copy

IMAGES = {"cifar10": (50000, 10000), "cifar100": (50000, 10000), "tinyimagenet": (100000, 10000)}


def stopwatch(function, times, synchronise=lambda: None):
    """The function, which then also appends its seconds to `times`."""
    def timed(*args, **kwargs):
        synchronise()
        start = time.perf_counter()
        result = function(*args, **kwargs)
        synchronise()
        times.append(time.perf_counter() - start)
        return result
    return timed


def profile(argv, steps):
    """A step beside the bare network on a ready batch, in turns, with a stopwatch on every part."""
    c = train.parse(argv)
    device, g, parts = train.pick_device(c.device), torch.Generator().manual_seed(0), {}
    data, buffer = train.load_data(c, device), ReservoirBuffer(c.buffer)
    p = simplex_etf(len(data.names), c.dim).to(device)
    buffer.add(*task_images(data, 1))
    images, labels = (torch.cat([a, b.to(device)]) for a, b in zip(
        task_images(data, 2), (buffer.images, buffer.labels)))
    size = min(c.batch_size, len(labels))
    batch, y = images[:size].repeat(2, 1, 1, 1), labels[:size].repeat(2)
    net, ready = train.load_net(None, c, device)[0].train(), augment(batch, g, **data.recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)     # nothing diverges
    compiled = torch.compile if c.compile else lambda module: module
    student, teacher = compiled(net), compiled(frozen_copy(net)) if c.stability != "none" else None
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    timed = lambda name, function: stopwatch(function, parts.setdefault(name, []), wait)

    def whole():
        x = timed("augmentation", augment)(batch, g, **data.recipe)
        past = None if teacher is None else timed("teacher forward", teacher)
        train.train_step(timed("student forward", student), past, optimizer, x, y, c=c, prototypes=p,
                         alpha={"ird": 0.0, "sprd": 1.0}.get(c.stability, 0.5), old=data.tasks[1][0], seen=data.tasks[1][-1] + 1)

    def bare():
        with torch.autocast(device.type, torch.bfloat16, enabled=c.amp):
            z = student(ready)
            with torch.no_grad():
                z_past = None if teacher is None else teacher(ready)
        optimizer.zero_grad()
        z.sum().backward()
        optimizer.step()

    for step in range(2 + steps):
        parts = {} if step == 2 else parts      # the first two warm up
        timed_losses = {key: timed("loss", getattr(train, key))
                        for key in ("fnc2_loss", "supcon_loss", "hsd_loss")}
        with mock.patch.multiple(train, **timed_losses), mock.patch.object(
                torch.Tensor, "backward", timed("backward", torch.Tensor.backward)
        ), mock.patch.object(optimizer, "step", timed("optimizer", optimizer.step)):
            timed("whole step", whole)()
        timed("bare network", bare)()
    mean = {name: sum(times) / steps for name, times in parts.items()}
    full, alone = mean.pop("whole step"), mean.pop("bare network")
    print(f"{device}, {torch.get_num_threads()} CPU threads, width {c.width}, {size} images, "
          f"{images.shape[-1]} pixels; mean of {steps} steps of task 2:")
    for name, seconds in sorted(mean.items(), key=lambda item: -item[1]):
        print(f"  {name:<18}{1000 * seconds:9.1f} ms {100 * seconds / full:6.1f} %")
    for name, seconds in (("whole step", full), ("bare network", alone)):
        print(f"  {name:<18}{1000 * seconds:9.1f} ms {2 * size / seconds:10.1f} views/s")
    print(f"  {'ratio':<18}{alone / full:9.3f}")
    total = len(labels) // size * (c.epochs * (c.tasks - 1) * full + c.epochs_first * (
        full - mean.get("teacher forward", 0)))
    print(f"  all {c.tasks} tasks with these settings: about {total / 3600:.1f} hours")


def losses():
    """Milliseconds forward and backward of supcon_loss and of fnc2_loss + hsd_loss, in turns."""
    for n, gamma in ((1024, 1), (1024, 4), (4096, 1), (4096, 4)):
        g, times = torch.Generator().manual_seed(0), ([], [])
        z, z_past = torch.nn.functional.normalize(torch.randn(2, n, 128, generator=g), dim=2)
        p, y = simplex_etf(10, 128), torch.randint(2, 4, (n,), generator=g)
        ours = lambda z: fnc2_loss(z, y, p, p[:2], tau=0.5, gamma=gamma) + hsd_loss(
            z, z_past, p[:4], 0.3, kappa_current=0.2, kappa_past=0.01, zeta_current=0.2,
            zeta_past=0.01)
        for _ in range(25 if n < 2000 else 7):
            for loss, found in zip((lambda z: supcon_loss(z, y, tau=0.5), ours), times):
                w = z.clone().requires_grad_()
                stopwatch(lambda: loss(w).backward(), found)()
        a, b = (1000 * statistics.median(found) for found in times)
        print(f"{n} views, gamma {gamma}: SupCon {a:.1f} ms, FNC2 + HSD {b:.1f} ms: {b / a:.2f}")


def probe(run):
    """Seconds of eval.py: for the linear readout, and for the rest, which is the image-free one."""
    data, linear, whole = train.load_data(train.open_run(run)[0], "cpu"), [], []
    few = data._replace(test_images=data.test_images[::99], test_labels=data.test_labels[::99])
    with mock.patch.object(evaluation, "load_data", lambda *_: few), mock.patch.object(
            evaluation, "linear_readout", stopwatch(evaluation.linear_readout, linear)):
        stopwatch(evaluation.evaluate, whole)(run)
    print(f"{len(linear)} tasks: linear readout {sum(linear):.1f} s, image-free "
          f"{whole[0] - sum(linear):.1f} s")


def train_steps(c, steps=2, teacher=True, before_each=lambda: None):
    """Steps of task 2 with settings c on black images; the second has the momentum in memory."""
    table, net = DATASETS[c.dataset], Encoder(c.width, c.dim)
    past = Encoder(c.width, c.dim) if teacher else None     # MemTracker fails on a frozen one
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    images = torch.zeros(2 * c.batch_size, 3, c.image_size, c.image_size, dtype=torch.uint8)
    labels = torch.arange(2 * c.batch_size) % 2 + 2
    for _ in range(steps):
        before_each()
        x = augment(images, **{key: table[key] for key in ("mean", "std", "crop", "blur")})
        train.train_step(net, past, optimizer, x, labels, old=2, seen=4, alpha=0.5, c=c,
                         prototypes=torch.zeros(table["classes"], c.dim))


def counted(mode, c, **how):
    """train_steps on fake tensors, which have a shape only, under a mode that counts."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    order = lambda n, generator=None: mock.Mock(tolist=lambda: list(range(n)))
    with FakeTensorMode(), mode, mock.patch.object(torch, "randperm", order):   # augment reads it
        train_steps(c, **how)
    return mode


def counted_gib(c):
    """All tensors of a step, at its peak."""
    from torch.distributed._tools.mem_tracker import MemTracker
    tracker = MemTracker()
    counted(tracker, c, before_each=tracker.reset_mod_stats)
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] / 2**30


def counted_flop(c, teacher):
    """Floating-point operations of a step, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode
    return counted(FlopCounterMode(display=False), c, steps=1, teacher=teacher).get_total_flops()


def measured_gib(c):
    """What this process grows by in the same steps on real tensors (Linux)."""
    status = lambda key: next(int(line.split()[1]) / 2**20 for line in open("/proc/self/status")
                              if line.startswith(key))
    ctypes.CDLL(None).mallopt(-3, 65536)        # M_MMAP_THRESHOLD: freed memory goes back at once
    before = status("VmRSS")
    train_steps(c)
    return status("VmHWM") - before


def memory(check):
    """Print the table of the presets, or one small step counted and measured."""
    if check:
        c = train.parse("--dataset cifar10 --batch-size 64".split())
        with multiprocessing.get_context("spawn").Pool(1) as fresh_process:
            measured = fresh_process.apply(measured_gib, (c,))
        return print(f"a step of width {c.width} with {c.batch_size} images in float32: counted "
                     f"{counted_gib(c):.2f} GiB, measured on the CPU {measured:.2f} GiB")
    print("| preset | GiB float32 | GiB bfloat16 (--amp) | GiB of its images | PFLOP a run "
          "| hours at 20 TFLOP/s: PFLOP / 72 |\n|---|---|---|---|---|---|")
    for name, (training, test) in IMAGES.items():
        c, amp = (train.parse(["--dataset", name, *flags]) for flags in ([], ["--amp"]))
        steps = training // c.tasks // c.batch_size         # of an epoch
        flop = steps * (c.epochs_first * counted_flop(c, teacher=False)
                        + (c.tasks - 1) * c.epochs * counted_flop(c, teacher=True)) / 1e15
        stored = 3 * c.image_size ** 2 * (training + test) / 2**30
        print(f"| {name} | {counted_gib(c):.1f} | {counted_gib(amp):.1f} | {stored:.1f} "
              f"| {flop:.0f} | {flop / 72:.1f} |", flush=True)
    print("\nCounted on fake tensors, not run. cuDNN's workspace and the allocator's slack are not "
          "in it; the images stay on the device as well.")


def main(argv):
    """What is no flag of ours is one of train.py's."""
    parser = argparse.ArgumentParser(prog="speed.py", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["profile", "losses", "probe", "memory"])
    parser.add_argument("--steps", type=int, default=10, help="of profile (10)")
    parser.add_argument("--check", action="store_true", help="memory: count and measure one step")
    args, rest = parser.parse_known_args(argv)
    refuse(args.what == "probe" and len(rest) != 1, "probe needs one RUN")
    {"profile": lambda: profile(rest, args.steps), "losses": losses, "probe": lambda: probe(*rest),
     "memory": lambda: memory(args.check)}[args.what]()


if __name__ == "__main__":
    train.command(main)
