"""Replay memory: a reservoir of raw images (Vitter 1985), as in the paper's section 4.2.

Offer each image of the stream once; after n offers every one of them is in the buffer with
probability capacity/n. It holds uint8 originals, not views. Capacity 0 is an ordinary value: the
buffer stays empty and nothing that uses it needs an `if`. Needs torch only.
"""

import torch


class ReservoirBuffer:
    """`images` (n, ...) uint8 and `labels` (n,), n <= capacity, on the device of what was added."""

    def __init__(self, capacity, seed=0):
        self.capacity, self.seen = capacity, 0
        self.images = torch.empty(0, dtype=torch.uint8)     # torch.cat takes (0,) beside any shape
        self.labels = torch.empty(0, dtype=torch.long)
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self):
        return len(self.labels)

    def add(self, images, labels):
        """Offer all images once, in random order: call it with a task's data when the task ends."""
        n = len(labels)
        order = torch.randperm(n, generator=self.generator)
        # The i-th image ever seen goes to a slot drawn from 0..i, and is kept if that slot exists.
        draws = torch.rand(n, dtype=torch.float64, generator=self.generator)
        rank = torch.arange(self.seen, self.seen + n)                # (n,) i of each offer
        slot = (draws * (rank + 1)).long()
        slot = torch.where(rank < self.capacity, rank, slot)         # the first fill the buffer
        kept = slot < self.capacity
        # A later offer to a slot replaces an earlier one.
        chosen = dict(zip(slot[kept].tolist(), order[kept].tolist()))
        self.seen += n
        size = min(self.seen, self.capacity)
        slots = torch.tensor(list(chosen), dtype=torch.long, device=labels.device)
        source = torch.tensor(list(chosen.values()), dtype=torch.long, device=labels.device)
        held = (self.images, self.labels) if len(self) else (images[:0], labels[:0])
        self.images, self.labels = (torch.cat([old, new.new_empty(size - len(old), *new.shape[1:])])
                                    for old, new in zip(held, (images, labels)))
        self.images[slots], self.labels[slots] = images[source], labels[source]

    def state_dict(self):
        return {"capacity": self.capacity, "seen": self.seen, "images": self.images,
                "labels": self.labels, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.capacity, self.seen = state["capacity"], state["seen"]
        self.images, self.labels = state["images"], state["labels"]
        self.generator.set_state(state["generator"].cpu())
