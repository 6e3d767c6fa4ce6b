"""Data: datasets as uint8 tensors, their split into tasks, and the random views of a batch.

`load` returns all images as uint8 tensors, to be kept on the training device. `augment` makes one
random view of each image of a batch: every view draws its own crop, flip and colours. `save` and
`read` write and read checkpoints. Needs torch, and torchvision for all datasets but `shapes`.
"""

import io
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

# crop: area of the random crop; blur: probability of blur; mean, std: of the training images.
DATASETS = {
    "shapes": dict(classes=10, tasks=5, size=32, crop=(0.6, 1.0), blur=0.0,
                   mean=(0.50, 0.50, 0.50), std=(0.29, 0.30, 0.29)),
    "cifar10": dict(classes=10, tasks=5, size=32, crop=(0.2, 1.0), blur=0.0,
                    mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),
    "cifar100": dict(classes=100, tasks=5, size=32, crop=(0.2, 1.0), blur=0.0,
                     mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
    "tinyimagenet": dict(classes=200, tasks=10, size=64, crop=(0.1, 1.0), blur=0.5,
                         mean=(0.4802, 0.4481, 0.3975), std=(0.2770, 0.2691, 0.2821)),
    "folder": dict(classes=None, tasks=None, size=32, crop=(0.2, 1.0), blur=0.0,
                   mean=None, std=None),
}


class UserError(Exception):
    """An error that the user can correct: the message gives the wrong value and what to do."""


def refuse(condition, message):
    """Raise a UserError if the condition holds."""
    if condition:
        raise UserError(message)


class Data(NamedTuple):
    train_images: torch.Tensor      # (n, 3, S, S) uint8
    train_labels: torch.Tensor      # (n,) int64, 0..K-1
    test_images: torch.Tensor
    test_labels: torch.Tensor
    val_images: torch.Tensor        # held out of the training images by val_fraction, else empty
    val_labels: torch.Tensor
    names: list                     # K class names
    tasks: list                     # T lists of class numbers: consecutive blocks, natural order
    recipe: dict                    # keyword arguments for `augment`: mean, std, crop, blur


def task_images(data, t):
    """The training images and labels of task t = 1..T."""
    classes = data.tasks[t - 1]
    of_task = (data.train_labels >= classes[0]) & (data.train_labels <= classes[-1])
    return data.train_images[of_task], data.train_labels[of_task]


# ------------------------------------------------------------------------ loading

def load(name, root="data", *, tasks=None, image_size=None, limit_per_class=None, val_fraction=0.0,
         seed=0):
    """Load a dataset of the table above from `root`; CIFAR is downloaded if it is not there.

    `image_size` resizes once, here. `val_fraction` of every class, drawn by `seed`, becomes the
    validation part; then `limit_per_class` keeps the first so many training images of each class.
    """
    table, root = DATASETS[name], Path(root).expanduser()
    size = image_size or table["size"]
    train, train_y, test, test_y, names = LOADERS[name](root)
    tasks = split_tasks(len(names), tasks or table["tasks"])
    train, test = (decode(part, size) if isinstance(part, list) else resize(part, size)
                   for part in (train, test))

    generator = torch.Generator().manual_seed(seed)
    val, kept = [], []
    for k in range(len(names)):
        index = (train_y == k).nonzero().squeeze(1)
        mixed = index[torch.randperm(len(index), generator=generator)]
        n_val = round(len(index) * val_fraction)
        refuse(n_val >= len(index) or val_fraction and n_val == 0, f"class {names[k]!r} has "
               f"{len(index)} training images: --val-fraction {val_fraction} does not split them")
        val.append(mixed[:n_val].sort().values)
        kept.append(mixed[n_val:].sort().values[:limit_per_class])
    val, kept = torch.cat(val), torch.cat(kept)
    recipe = {key: table[key] for key in ("mean", "std", "crop", "blur")}
    if recipe["mean"] is None:
        moments = sum(torch.stack([(x.double() / 255).pow(k).mean((2, 3)).sum(0) for k in (1, 2)])
                      for x in train[kept].split(1000)) / len(kept)             # (2, 3)
        recipe["mean"] = moments[0].tolist()
        recipe["std"] = (moments[1] - moments[0] ** 2).clamp(min=1e-6).sqrt().tolist()
    return Data(train[kept], train_y[kept], test, test_y, train[val], train_y[val], names, tasks,
                recipe)


def split_tasks(num_classes, num_tasks):
    """Classes 0..K-1 in T consecutive blocks of equal size."""
    refuse(num_classes % num_tasks,
           f"--tasks {num_tasks} does not divide the {num_classes} classes equally")
    block = num_classes // num_tasks
    return [list(range(t * block, (t + 1) * block)) for t in range(num_tasks)]


def resize(images, size):
    """(n, 3, H, W) uint8 -> (n, 3, size, size) uint8, antialiased, a thousand images at a time."""
    if images.shape[-2:] == (size, size):
        return images
    return torch.cat([F.interpolate(part.float(), (size, size), mode="bilinear", antialias=True)
                      .round_().clamp_(0, 255).byte() for part in images.split(1000)])


# A loader returns training images, labels, test images, labels (images: uint8 or files) and names.

def load_cifar(root, variant):
    """CIFAR-10 or CIFAR-100 through torchvision, which verifies the md5 of every file."""
    import torchvision
    parts = []
    try:
        for train in (True, False):
            part = getattr(torchvision.datasets, variant)(root, train=train, download=True)
            images = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
            parts += [images, torch.tensor(part.targets)]
    except (OSError, RuntimeError) as error:                # no network; wrong md5
        raise UserError(f"{variant} is not complete in {root} and could not be downloaded "
                        f"({error}); see https://www.cs.toronto.edu/~kriz/cifar.html") from None
    return (*parts, part.classes)


def load_tiny_imagenet(root):
    """The official tiny-imagenet-200.zip, unpacked in `root`; classes in the order of wnids.txt."""
    folder = root / "tiny-imagenet-200"
    try:
        names = (folder / "wnids.txt").read_text().split()
        train = [sorted((folder / "train" / name / "images").glob("*.JPEG")) for name in names]
        lines = (folder / "val" / "val_annotations.txt").read_text().splitlines()
        test, test_names = zip(*(line.split("\t")[:2] for line in lines))
        counts = sorted({len(files) for files in train})
        if len(counts) > 1:
            raise OSError(f"its classes have {counts[0]} to {counts[-1]} training images")
    except OSError as error:
        raise UserError(f"Tiny-ImageNet is not complete in {root} ({error}): unpack "
                        "http://cs231n.stanford.edu/tiny-imagenet-200.zip there") from None
    return (sum(train, []), torch.arange(len(names)).repeat_interleave(counts[0]),
            [folder / "val" / "images" / file for file in test],
            torch.tensor([names.index(name) for name in test_names]), names)


def load_folder(root):
    """Any images: root/train/<class>/ and root/test/<class>/ (or val/), classes sorted by name."""
    from torchvision.datasets import ImageFolder
    try:
        parts = [ImageFolder(root / "train"),
                 ImageFolder(root / ("test" if (root / "test").is_dir() else "val"))]
    except OSError as error:
        raise UserError(f"--data-dir {root} must hold train/<class>/ and test/<class>/ (or val/): "
                        f"{error}") from None
    names, others = (part.classes for part in parts)
    refuse(names != others, f"class {sorted(set(names) ^ set(others))[:1]} is only in one of "
           f"{parts[0].root} and {parts[1].root}: both need all classes")
    refuse(len(names) < 2, f"{root} has one class, at least 2 are needed")
    train, test = (([file for file, _ in part.samples], torch.tensor(part.targets))
                   for part in parts)
    return *train, *test, names


def decode(files, size):
    """Image files -> (n, 3, size, size) uint8: resized and cropped to the central square."""
    from PIL import Image, ImageOps                         # comes with torchvision
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8)
    for i, file in enumerate(files):
        if i % 10000 == 0:
            print(f"decoding image {i + 1} of {len(files)}: {file}", flush=True)
        try:
            image = ImageOps.fit(Image.open(file).convert("RGB"), (size, size), Image.BILINEAR)
        except OSError as error:
            raise UserError(f"{file} is not a readable image ({error}): delete it") from None
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        images[i] = pixels.view(size, size, 3).permute(2, 0, 1)
    return images


# ------------------------------------------------------------------------ drawn shapes

# Signed distances, positive inside, in units of the radius; r and box: norm and max-norm of (x, y).
SHAPES = {
    "disc": lambda x, y, r, box: 0.85 - r,
    "cross": lambda x, y, r, box: torch.minimum(0.25 - torch.minimum(x.abs(), y.abs()), 0.95 - box),
    "square": lambda x, y, r, box: 0.75 - box,
    "star": lambda x, y, r, box: 0.62 + 0.33 * torch.cos(5 * torch.atan2(y, x)) - r,
    "ring": lambda x, y, r, box: 0.22 - (r - 0.72).abs(),
    "bar": lambda x, y, r, box: torch.minimum(0.3 - y.abs(), 1 - x.abs()),
    "triangle": lambda x, y, r, box: 0.5 - torch.maximum(-y, 0.866 * x.abs() + 0.5 * y),
    "dumbbell": lambda x, y, r, box: 0.4 - torch.hypot(x.abs() - 0.55, y),
    "crescent": lambda x, y, r, box: torch.minimum(0.95 - r, torch.hypot(x - 0.45, y) - 0.7),
    "frame": lambda x, y, r, box: 0.2 - (box - 0.62).abs(),
}


def load_shapes(root):
    """Ten classes of drawn shapes, 2,000 training and 200 test images each, of different seeds."""
    train, test = (torch.arange(10).repeat_interleave(count) for count in (2000, 200))
    return draw_shapes(train, 0), train, draw_shapes(test, 1), test, list(SHAPES)


def draw_shapes(labels, seed, size=32):
    """(n,) labels -> (n, 3, size, size) uint8: random place, size, rotation, colours and noise."""
    g, n = torch.Generator().manual_seed(seed), len(labels)
    u = torch.rand(n, 5, 1, 1, generator=g).unbind(1)                       # five of (n, 1, 1)
    axis = (torch.arange(size) + 0.5) / size * 2 - 1                        # pixel centres, -1..1
    radius, angle, slope = 0.5 + 0.25 * u[0], 2 * math.pi * u[3], 2 * math.pi * u[4]
    x = (axis - (1 - radius) * (2 * u[1] - 1)) / radius                     # (n, 1, size)
    y = (axis[:, None] - (1 - radius) * (2 * u[2] - 1)) / radius            # (n, size, 1)
    x, y = x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()
    inside = torch.empty(n, size, size)
    for k, signed_distance in enumerate(SHAPES.values()):
        a, b = x[labels == k], y[labels == k]
        box = torch.maximum(a.abs(), b.abs())
        inside[labels == k] = signed_distance(a, b, torch.hypot(a, b), box)
    mask = (inside * radius * size / 2 + 0.5).clamp(0, 1)[:, None]          # (n, 1, size, size)

    ground, figure, shade = torch.rand(3, n, 3, 1, 1, generator=g)          # colours (n, 3, 1, 1)
    gap = luminance(figure) - luminance(ground)                             # raised to 0.35
    figure = figure + torch.where(gap < 0, -1, 1) * (0.35 - gap.abs()).clamp(min=0)
    ramp = (axis * slope.cos() + axis[:, None] * slope.sin())[:, None]      # (n, 1, size, size)
    ground = ground + 0.25 * (shade - 0.5) * ramp
    image = ground + (figure - ground) * mask
    image = image + 0.05 * torch.randn(image.shape, generator=g)
    return (image.clamp(0, 1) * 255).round().byte()


LOADERS = {"shapes": load_shapes, "tinyimagenet": load_tiny_imagenet, "folder": load_folder,
           "cifar10": lambda root: load_cifar(root, "CIFAR10"),
           "cifar100": lambda root: load_cifar(root, "CIFAR100")}


# ------------------------------------------------------------------------ views

def normalise(x, mean, std):
    """(B, 3, S, S) uint8, or float in 0..1 -> normalised float32 in channels_last."""
    x = x / 255 if x.dtype == torch.uint8 else x
    mean, std = (torch.as_tensor(v, device=x.device).view(3, 1, 1) for v in (mean, std))
    return ((x - mean) / std).contiguous(memory_format=torch.channels_last)


def augment(images, generator=None, *, mean, std, crop=(0.2, 1.0), blur=0.0, jitter=0.8, grey=0.2,
            share=slice(None)):
    """One random view of each image: (B, 3, S, S) uint8 -> normalised float32.

    Random resized crop, horizontal flip, colour jitter (0.4, 0.4, 0.4, 0.1) with probability
    `jitter`, greyscale with `grey`, Gaussian blur with `blur`. Every view draws its own parameters;
    only the order of the four colour changes is drawn once a batch. The generator is the CPU's on
    every device, so that all devices see the same views. `share`: parameters are drawn for all
    images, but views are made of these alone, for one of several processes.
    """
    # columns of u: 0-21 box, 22 flip, 23 jitter or not, 24-27 its strengths, 28 grey, 29-30 blur
    u = torch.rand(len(images), 31, generator=generator, pin_memory=images.is_cuda)[share]
    order = torch.randperm(4, generator=generator).tolist()
    images = images[share]
    B, size = len(images), images.shape[-1]
    u = u.to(images.device, non_blocking=images.is_cuda)            # pinned: it waits for nothing
    x = random_crop_flip(images, u[:, :23], crop)
    if jitter:
        shift = (2 * u[:, 24:28] - 1) * (u[:, 23:24] < jitter)          # (B, 4); 0 changes nothing
        x = jitter_colours(x, shift, order)
    if grey:
        x = torch.where((u[:, 28] < grey).view(B, 1, 1, 1), luminance(x), x)
    if blur:
        sigma = torch.where(u[:, 29] < blur, 0.1 + 1.9 * u[:, 30], 1e-3).view(B, 1, 1)
        pixel = torch.arange(size, device=x.device, dtype=x.dtype)
        kernel = torch.exp(-0.5 * ((pixel[:, None] - pixel) / sigma) ** 2)      # (B, S, S)
        kernel = (kernel / kernel.sum(2, keepdim=True))[:, None]        # no blur: the identity
        x = kernel @ x @ kernel.transpose(2, 3)                         # columns, then rows
    return normalise(x, mean, std)


def crop_boxes(u, size, area, ratio=(3 / 4, 4 / 3)):
    """torchvision's RandomResizedCrop, batched: u (B, 22) in 0..1 -> top, left, height, width (B,).

    Ten tries at an area and an aspect ratio; the first box that fits, or else the whole image.
    """
    pixels = size * size * (area[0] + (area[1] - area[0]) * u[:, :10])          # (B, 10)
    aspect = torch.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * u[:, 10:20])
    width, height = (pixels * aspect).sqrt().round(), (pixels / aspect).sqrt().round()
    fits = (width > 0) & (width <= size) & (height > 0) & (height <= size)
    first = fits.float().argmax(1, keepdim=True)                                # (B, 1)
    width, height = (torch.where(fits.any(1), side.gather(1, first).squeeze(1), size)
                     for side in (width, height))                               # (B,)
    top, left = (u[:, 20] * (size - height + 1)).floor(), (u[:, 21] * (size - width + 1)).floor()
    return top, left, height, width


def random_crop_flip(images, u, area):
    """Crop, resize back and flip: (B, 3, S, S) -> float32 in 0..1, two matrix products each.

    Bilinear interpolation is linear: row i of an (S, S) matrix holds the two weights of output i.
    """
    size = images.shape[-1]
    top, left, height, width = (v[:, None] for v in crop_boxes(u, size, area))  # (B, 1)
    pixel = torch.arange(size, device=images.device, dtype=torch.float32)       # (S,)

    def weights(start, length, position):                                       # (B, S out, S in)
        source = start + (position + 0.5) * length / size - 0.5
        source = torch.minimum(torch.maximum(source, start), start + length - 1)
        return (1 - (source[:, :, None] - pixel).abs()).clamp(min=0)

    flipped = torch.where(u[:, 22:23] < 0.5, size - 1 - pixel, pixel)           # (B, S)
    rows, columns = weights(top, height, pixel), weights(left, width, flipped)
    return rows[:, None] @ (images / 255) @ columns.transpose(1, 2)[:, None]


def luminance(x):
    """(B, 3, H, W) -> (B, 1, H, W), the grey that torchvision uses."""
    return 0.2989 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]


def jitter_colours(x, shift, order):
    """Brightness, contrast, saturation (+-40 %) and hue (+-0.1 turn) of (B, 3, H, W), in `order`.

    shift (B, 4) in -1..1. As in torchvision the first three blend with black, with the image's mean
    grey and with its greyscale.
    """
    brightness, contrast, saturation, hue = shift.view(-1, 4, 1, 1, 1).unbind(1)  # (B, 1, 1, 1)
    changes = [
        lambda x: (x * (1 + 0.4 * brightness)).clamp(0, 1),
        lambda x: torch.lerp(luminance(x).mean((2, 3), True), x, 1 + 0.4 * contrast).clamp(0, 1),
        lambda x: torch.lerp(luminance(x), x, 1 + 0.4 * saturation).clamp(0, 1),
        lambda x: turn_hue(x, 0.1 * hue),
    ]
    for k in order:
        x = changes[k](x)
    return x


def turn_hue(x, turn):
    """Turn the hue of (B, 3, H, W) by (B, 1, 1, 1) of a circle, same saturation and value."""
    red, green, blue = x.unbind(1)
    value = x.amax(1)
    chroma = value - x.amin(1)
    safe = torch.where(chroma > 0, chroma, 1)
    hue = torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    hue = torch.where(value == red, (green - blue) / safe, hue)             # (B, H, W) in -1..5
    k = torch.arange(5, 0, -2, device=x.device).view(3, 1, 1)               # 5, 3, 1: R, G, B
    k = (k + hue[:, None] + 6 * turn).remainder(6)                          # (B, 3, H, W)
    return value[:, None] - chroma[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)


# ------------------------------------------------------------------------ files

def save(path, state):
    """Write tensors and plain values so that a reader never sees half a file."""
    content = io.BytesIO()
    torch.save(state, content)
    write(path, content.getbuffer())


def write(path, content):
    """Write bytes to a temporary file, flush it to the disk, then rename it to `path`."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written ({error}); existing checkpoints are intact: "
                        "free disk space, then continue with --resume") from None


def read(path, device="cpu"):
    """Read a dictionary written by `save`; weights_only: a file cannot run code."""
    try:
        return dict(torch.load(path, map_location=device, weights_only=True))
    except Exception as error:                              # a foreign file can fail in any way
        raise UserError(f"{path} is not a checkpoint of this program, or it is damaged "
                        f"({type(error).__name__})") from None
