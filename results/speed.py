"""The speed figures, each measured against its reference in one run, in turns.

    python results/speed.py profile [train's flags] [--steps N]
    python results/speed.py pipeline --data-dir data --width 16 --batch-size 128
    python results/speed.py losses
    python results/speed.py memory
    python results/speed.py probe RUN

profile: where the time of a training step of task 2 goes, beside the bare network on a ready batch,
    and the hours that the settings would take; trains nothing and writes nothing.
pipeline: training steps of task 2 on CIFAR-10, beside the usual contrastive pipeline: a DataLoader
    with two workers and torchvision's PIL transforms, two views an image, contiguous memory and the
    same network and losses.
losses: fnc2_loss + hsd_loss, forward and backward, beside a plain SupCon of one n x n log-softmax.
memory: the most that either of these two holds at a time.
probe: all readouts of a run, seconds each, beside a classifier with new crops in every epoch.
"""

import argparse
import ctypes
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
import eval as evaluation
import train
from train import load_data, load_task, open_run
from buffer import ReservoirBuffer
from data import augment, normalise, of_classes
from etf import simplex_etf
from losses import fnc2_loss, hsd_loss
from model import frozen_copy


def profile(argv, steps):
    """Time the parts of train_step from outside: every function that it calls gets a stopwatch."""
    c = train.parse(argv)
    device = train.pick_device(c.device)
    data = load_data(c, device)
    prototypes, buffer = simplex_etf(len(data.names), c.dim).to(device), ReservoirBuffer(c.buffer)
    first = train.make_task(data, 1, buffer, prototypes)
    buffer.add(first.images, first.labels)
    task = train.make_task(data, 2, buffer, prototypes)
    net = train.make_net(c, device).train()
    optimizer, generator = train.make_optimizer(c, net), torch.Generator().manual_seed(0)
    optimizer.param_groups[0]["lr"] = 0.0       # time does not depend on it, and nothing diverges
    compiled = torch.compile if c.compile else lambda module: module
    student, teacher = compiled(net), compiled(frozen_copy(net)) if c.stability != "none" else None
    parts = {}

    def now():
        if device.type in ("cuda", "mps"):
            getattr(torch, device.type).synchronize()
        return time.perf_counter()

    def timed(name, function):
        parts.setdefault(name, [])
        def call(*args, **kwargs):
            start = now()
            result = function(*args, **kwargs)
            parts[name].append(now() - start)
            return result
        return call

    bare = (student, teacher, torch.Tensor.backward, optimizer.step)
    train.augment = timed("augmentation", train.augment)
    student = timed("student forward", student)
    teacher = timed("teacher forward", teacher) if teacher is not None else None
    for name in ("fnc2_loss", "supcon_loss", "hsd_loss"):
        setattr(train, name, timed("loss", getattr(train, name)))
    torch.Tensor.backward = timed("backward", torch.Tensor.backward)
    optimizer.step = timed("optimizer", optimizer.step)
    whole = timed("whole step", train.train_step)

    size = min(c.batch_size, len(task.pool_labels))
    images, labels = task.pool_images[:size], task.pool_labels[:size]
    ready = augment(images.repeat(2, 1, 1, 1), generator, **task.recipe)

    def bare_network():
        with torch.autocast(device.type, torch.bfloat16, enabled=c.amp):
            z = bare[0](ready)
            if bare[1] is not None:
                with torch.no_grad():
                    bare[1](ready)
        optimizer.zero_grad()
        bare[2](z.sum())
        bare[3]()

    bare_step = timed("bare network", bare_network)
    for step in range(2 + steps):
        if step == 2:                           # the first two warm up
            for times in parts.values():
                times.clear()
        whole(images, labels, task, student, teacher, None, optimizer, c, generator, 0.5)
        bare_step()
    mean = {name: sum(times) / steps for name, times in parts.items()}
    full, alone = mean.pop("whole step"), mean.pop("bare network")
    print(f"{device}, {torch.get_num_threads()} CPU threads, width {c.width}, {size} images, "
          f"{images.shape[-1]} pixels; mean of {steps} steps of task 2:")
    for name, seconds in mean.items():
        print(f"  {name:<18}{1000 * seconds:9.1f} ms {100 * seconds / full:6.1f} %")
    for name, seconds in (("whole step", full), ("bare network", alone)):
        print(f"  {name:<18}{1000 * seconds:9.1f} ms {2 * size / seconds:10.1f} views/s")
    print(f"  {'ratio':<18}{alone / full:9.3f}\n  {'peak memory':<18}{peak_memory(device):9.2f} GB")
    total = max(1, len(first.labels) // size) * c.epochs_first * (
        full - mean.get("teacher forward", 0))
    total += len(task.pool_labels) // size * c.epochs * full * (c.tasks - 1)
    print(f"  all {c.tasks} tasks with these settings: about {total / 3600:.1f} hours")


def peak_memory(device):
    """Gigabytes, of the CUDA device or else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    import resource                                         # not on Windows
    unit = 1e9 if sys.platform == "darwin" else 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def pipeline(data_dir, width, batch_size, steps=4, rounds=3):
    import torchvision.transforms as T
    from PIL import Image
    flags = f"--dataset cifar10 --data-dir {data_dir} --width {width} --batch-size {batch_size}"
    c, device = train.parse(flags.split()), torch.device("cpu")
    data = load_data(c, device)
    task = train.make_task(data, 2, ReservoirBuffer(0), simplex_etf(10, c.dim))
    transform = T.Compose([
        T.RandomResizedCrop(32, scale=(0.2, 1.0)), T.RandomHorizontalFlip(),
        T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8), T.RandomGrayscale(0.2),
        T.ToTensor(), T.Normalize(data.recipe["mean"].tolist(), data.recipe["std"].tolist())])

    class TwoViews(torch.utils.data.Dataset):
        images, labels = task.images.permute(0, 2, 3, 1).numpy(), task.labels
        def __len__(self):
            return len(self.labels)
        def __getitem__(self, i):
            image = Image.fromarray(self.images[i])
            return transform(image), transform(image), self.labels[i]

    def setup(memory_format):
        net = train.make_net(c, device).to(memory_format=memory_format)
        return net, frozen_copy(net), torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)

    def usual():
        loader = torch.utils.data.DataLoader(TwoViews(), batch_size, shuffle=True, num_workers=2,
                                             drop_last=True)
        net, teacher, optimizer = setup(torch.contiguous_format)
        batches = iter(loader)
        for step in range(2 + steps):
            if step == 2:
                start = time.perf_counter()
            a, b, labels = next(batches)
            x, y = torch.cat([a, b]), labels.repeat(2)
            z = net(x)
            with torch.no_grad():
                z_past = teacher(x)
            loss = fnc2_loss(z, y, task.prototypes, task.prototypes[:2], tau=c.tau, gamma=c.gamma)
            loss = loss + hsd_loss(z, z_past, task.prototypes[:4], 0.5, kappa_current=0.2,
                                   kappa_past=0.01, zeta_current=0.2, zeta_past=0.01)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return 2 * batch_size * steps / (time.perf_counter() - start)

    def ours():
        net, teacher, optimizer = setup(torch.channels_last)
        g = torch.Generator().manual_seed(0)
        for step in range(2 + steps):
            if step == 2:
                start = time.perf_counter()
            some = torch.randint(len(task.labels), (batch_size,), generator=g)
            train.train_step(task.images[some], task.labels[some], task, net, teacher, None,
                             optimizer, c, g, 0.5)
        return 2 * batch_size * steps / (time.perf_counter() - start)

    pairs = [(usual(), ours()) for _ in range(rounds)]
    for a, b in pairs:
        print(f"usual {a:8.1f} views/s   ours {b:8.1f} views/s   ratio {b / a:.2f}")
    print(f"median ratio {statistics.median(b / a for a, b in pairs):.2f}")


def plain_supcon(z, labels, tau):
    eye = torch.eye(len(z), dtype=torch.bool)
    log_p = (z @ z.T / tau).masked_fill(eye, -torch.inf).log_softmax(1)
    positive = (labels[:, None] == labels) & ~eye
    return -(log_p.masked_fill(~positive, 0).sum(1) / positive.sum(1)).mean()


def one_loss(name, z, z_past, p, labels, gamma):
    if name == "plain SupCon":
        return plain_supcon(z, labels, 0.5)
    loss = fnc2_loss(z, labels, p, p[:2], tau=0.5, gamma=gamma)
    return loss + hsd_loss(z, z_past, p[:4], 0.3, kappa_current=0.2, kappa_past=0.01,
                           zeta_current=0.2, zeta_past=0.01)


def peak_matrices(n, work):
    """The most memory that `work` holds at a time, in n x n float32 matrices (Linux)."""
    status = lambda key: next(int(line.split()[1]) for line in open("/proc/self/status")
                              if line.startswith(key))
    ctypes.CDLL(None).mallopt(-3, 65536)        # M_MMAP_THRESHOLD: freed memory goes back at once
    Path("/proc/self/clear_refs").write_text("5")               # forget the peak so far
    before = status("VmRSS")
    work()
    return (status("VmHWM") - before) * 1024 / (4 * n * n)


def losses(memory=False):
    names = ("plain SupCon", "fnc2 + hsd")
    for n, gamma in ((1024, 1), (1024, 4), (4096, 1), (4096, 4)):
        g = torch.Generator().manual_seed(0)
        z, z_past = (F.normalize(torch.randn(n, 128, generator=g), dim=1) for _ in range(2))
        p, labels = simplex_etf(10, 128), torch.randint(2, 4, (n,), generator=g)
        if memory:
            w = z.clone().requires_grad_()
            a, b = (peak_matrices(n, lambda: one_loss(name, w, z_past, p, labels, gamma).backward())
                    for name in names)
            print(f"{n} views, gamma {gamma}: peak memory of {a:.2f} n x n float32 matrices in "
                  f"plain SupCon, {b:.2f} in fnc2 + hsd")
            continue
        times = {name: [] for name in names}
        for _ in range(25 if n < 2000 else 7):
            for name in names:
                w = z.clone().requires_grad_()
                start = time.perf_counter()
                one_loss(name, w, z_past, p, labels, gamma).backward()
                times[name].append(time.perf_counter() - start)
        a, b = (1000 * statistics.median(times[name]) for name in names)
        print(f"{n} views, gamma {gamma}: plain SupCon {a:.1f} ms, fnc2 + hsd {b:.1f} ms, ratio "
              f"{b / a:.2f}")


def probe(run, epochs=100):
    """Every readout of all tasks of a run; (epochs, epochs) crops are new ones in every epoch."""
    c, finished = open_run(run)
    data, g = load_data(c, torch.device("cpu")), torch.Generator().manual_seed(c.seed)
    crop = lambda x: augment(x, g, **data.recipe | {"blur": 0}, jitter=0, grey=0)
    plain = lambda x: normalise(x, data.recipe["mean"], data.recipe["std"])
    old = ReservoirBuffer(200, seed=c.seed)
    variants = [(1, 1), (4, 4), (8, 8), (4, 32), (epochs, epochs), "image-free"]
    encoded, seconds = dict.fromkeys(variants, 0), dict.fromkeys(variants, 0.0)
    statistics = last_net = None

    def crops(images):                                          # features and seconds, a crop each
        parts, times = [], []
        for _ in range(epochs):
            start = time.perf_counter()
            parts += [evaluation.encode(net, images, crop)[0]] if len(images) else []
            times.append(time.perf_counter() - start)
        return parts, times

    for t, file in enumerate(finished):
        _, net = load_task(file, c, "cpu")
        mine = of_classes(data.train_labels, data.tasks[t])
        images, labels = data.train_images[mine], data.train_labels[mine]
        seen = data.tasks[t][-1] + 1
        shown = data.test_labels < seen
        h, _ = evaluation.encode(net, data.test_images[shown], plain)
        (new, new_times), (few, few_times) = crops(images), crops(old.images)
        for variant in variants:
            start = time.perf_counter()
            if variant == "image-free":
                features = evaluation.encode(net, images, plain)[0].double()
                own = evaluation.class_statistics(features, labels)
                if t:
                    before = evaluation.encode(last_net, images, plain)[0].double()
                    drift = evaluation.fit_map(before, features)
                    own = evaluation.join(*evaluation.carry(*statistics, *drift), *own)
                statistics, encoded[variant] = own, encoded[variant] + (1 + bool(t)) * len(images)
                weight, bias = (part.float() for part in evaluation.discriminant(*statistics))
            else:
                a, b = variant
                weight, bias = evaluation.linear_probe(
                    torch.cat(new[:a] + few[:b]), torch.cat([labels] * a + [old.labels] * b), seen,
                    draws=len(labels) + len(old), epochs=epochs, lr=0.1, seed=0)
                seconds[variant] += sum(new_times[:a]) + sum(few_times[:b])
                encoded[variant] += a * len(labels) + b * len(old)
            seconds[variant] += time.perf_counter() - start
            if t == len(finished) - 1:
                rows = evaluation.accuracies(F.linear(h, weight, bias), data.test_labels[shown],
                                             data.tasks[:t + 1])
                print(f"{variant}: {encoded[variant]} encoded, {seconds[variant]:.1f} s in all; "
                      f"Class-IL AA {sum(rows[0]) / (t + 1):.2f}  Task-IL AA "
                      f"{sum(rows[1]) / (t + 1):.2f}")
        old.add(images, labels)
        last_net = net


def main(argv):
    """Whatever is no flag of ours here is one of train.py's."""
    parser = argparse.ArgumentParser(prog="speed.py", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["profile", "pipeline", "losses", "memory", "probe"])
    if argv[:1] == ["profile"]:
        parser.add_argument("--steps", type=int, default=10, help="to time (10)")
        args, flags = parser.parse_known_args(argv)
        return profile(flags, args.steps)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args(argv)
    if args.what == "pipeline":
        pipeline(args.data_dir, args.width, args.batch_size)
    elif args.what == "probe":
        if args.run is None:
            parser.error("probe needs a RUN")
        probe(args.run)
    else:
        losses(memory=args.what == "memory")    # memory changes how it is allocated: one at a time


if __name__ == "__main__":
    train.command(main)
