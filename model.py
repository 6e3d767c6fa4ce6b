"""The network h = g o f: ResNet-18 for small images, then a projector onto the unit sphere.

f is ResNet-18 as contrastive continual learning uses it on 32x32 and 64x64 images: 3x3 stem with
stride 1, no max-pool, last layer removed. `width` scales every stage (64 = ResNet-18, 512 features)
so that the same code runs on a laptop. g is Linear-BatchNorm-ReLU-Linear, as in the authors' code;
a ReLU on its *output* would make half of every prototype's coordinates unreachable. Needs torch
only.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):                                            # (B, channels_in, H, W)
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out)) + self.shortcut(x)
        return F.relu(out, inplace=True)                             # (B, channels, H', W')


class Encoder(nn.Module):
    """Images to `features` (B, 8*width) for the classifier, and to unit embeddings (B, dim)."""

    def __init__(self, width=64, dim=128):
        super().__init__()
        w = width
        self.stem = nn.Sequential(
            nn.Conv2d(3, w, 3, padding=1, bias=False), nn.BatchNorm2d(w), nn.ReLU(inplace=True))
        stages = [(w, w, 1), (w, 2 * w, 2), (2 * w, 4 * w, 2), (4 * w, 8 * w, 2)]
        self.stages = nn.Sequential(*[
            nn.Sequential(BasicBlock(a, b, s), BasicBlock(b, b, 1)) for a, b, s in stages])
        self.projector = nn.Sequential(
            nn.Linear(8 * w, 8 * w), nn.BatchNorm1d(8 * w), nn.ReLU(inplace=True),
            nn.Linear(8 * w, dim))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x):
        """(B, 3, H, W) normalised images -> (B, 8*width): what the linear classifier reads."""
        return self.stages(self.stem(x)).mean((2, 3))

    def joined(self, x):
        """(B, 3, H, W) -> (B, 16*width): stem and four stages, pooled, for the image-free readout.

        The last 8*width are `features`. Earlier layers move less from task to task.
        """
        maps = [self.stem(x)]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return torch.cat([part.mean((2, 3)) for part in maps], 1)

    def forward(self, x):
        """(B, 3, H, W) -> (B, dim): z of the paper, unit vectors, float32 under autocast too."""
        return F.normalize(self.projector(self.features(x)).float(), dim=1)


def frozen_copy(net):
    """The teacher: a copy that no gradient reaches and nothing changes.

    It stays in training mode: its BatchNorm normalises by the batch, as the student's does and as
    in the authors' code. Running statistics are not used, and momentum 0 keeps them as they are.
    """
    teacher = copy.deepcopy(net).train().requires_grad_(False)
    for module in teacher.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.0
    return teacher
