"""The losses as pure functions: FNC2 (Eq. 7-9) learns a task, HSD (Eq. 10) keeps the old ones.

Also the parts that the paper's ablations combine: SupCon (Eq. 3) with IRD is Co2L.
Conventions, the same everywhere:
  z           (n, d) unit embeddings of the n = 2N views of a batch (N images, two views each)
  z_past      (n, d) unit embeddings of the same views by the frozen model of the previous task
  labels      (n,)   class of each view; prototypes[labels] are their prototypes
  prototypes  (K, d) unit rows, see etf.py
Every loss is a mean over views, not the paper's sum, which would tie the learning rate to the batch
size. Similarities and softmaxes are float32 even under autocast: at kappa 0.01 one bfloat16 step is
0.4 nats. Needs torch only.
"""

import torch

SELF = -1e9     # in place of z_i.z_i: its softmax is 0, its gradient too, and 0 * SELF is not nan
BLOCK = 2**19   # similarities held at a time: 2 MB of float32, a CPU's cache; 32 times that on GPUs


def similarities(a, b, temperature):
    """a_i . b_j / temperature: (n, d), (m, d) -> (n, m), in float32 or better."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return (a.to(dtype) / temperature) @ b.to(dtype).T


def without_self(logits, rows):
    """Take the views themselves out of their rows: (b, >= n) logits of the views in `rows`."""
    logits.detach().diagonal(rows.start).fill_(SELF)        # detached: nothing flows there anyway
    return logits


def positives(labels, rows):
    """P(i) of Eq. 4 as a 0/1 matrix (b, n) for the views in `rows`: same label, not itself."""
    positive = (labels[rows, None] == labels).float()
    positive.diagonal(rows.start).fill_(0)
    return positive


class SumOverRows(torch.autograd.Function):
    """Sum of loss_i over n views: sum_over_rows(loss_of, z, ...), loss_of(rows, z, ...) -> (b,).

    loss_i needs row i of the (n, n) similarities, not all n of them. So a block of rows is taken at
    a time, and its gradient at once: the (n, n) floats are never held, and a block stays in cache.
    n is the length of the first tensor. forward finds the gradient too and backward only scales it:
    there is no second derivative.
    """

    @staticmethod
    def forward(ctx, loss_of, *tensors):
        wide = [torch.promote_types(t.dtype, torch.float32) for t in tensors]
        leaves = [t.detach().to(w).requires_grad_(t.requires_grad) for t, w in zip(tensors, wide)]
        wanted, n, device = [t for t in leaves if t.requires_grad], len(leaves[0]), leaves[0].device
        total, gradients = 0, [torch.zeros_like(t) for t in wanted]
        size = max(1, (BLOCK if device.type == "cpu" else 32 * BLOCK) // n)
        for start in range(0, n, size):
            rows = slice(start, min(n, start + size))
            with torch.set_grad_enabled(bool(wanted)), torch.autocast(device.type, enabled=False):
                loss = loss_of(rows, *leaves).sum()
                new = torch.autograd.grad(loss, wanted) if wanted else []
            total = total + loss.detach()
            for sofar, part in zip(gradients, new):
                sofar += part
        ctx.save_for_backward(*(gradients.pop(0) if t.requires_grad else None for t in leaves))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        return None, *(None if g is None else g * upstream for g in ctx.saved_tensors)


sum_over_rows = SumOverRows.apply


def focal(log_p, gamma):
    """(1 - p)^gamma log p, elementwise; gradients flow through the weight too, as in focal loss."""
    if gamma == 0:
        return log_p
    hardness = 1 - log_p.exp()
    if gamma != 1:                      # x^gamma as exp(gamma log x), several times as fast as pow
        hardness = (gamma * hardness.clamp(min=torch.finfo(log_p.dtype).eps).log()).exp()
    return hardness * log_p


def fnc2_loss(z, labels, prototypes, old_prototypes=None, anchors=None, *, tau, gamma):
    """Focal Neural Collapse Contrastive loss (Eq. 7-9), a mean over anchors.

        D_i    = sum_{k != i} exp(z_i.z_k / tau) + sum_{p in P_1:t-1} exp(z_i.p / tau)
        c_ij   = exp(z_i.z_j / tau) / D_i              for the positives j in P(i)
        r_i    = exp(z_i.p_yi / tau) / D_i             for the view's own prototype
        loss_i = -1/(|P(i)|+1) * ( sum_j (1-c_ij)^gamma log c_ij + (1-r_i)^gamma log r_i )

    old_prototypes (m, d): P_1:t-1, the pseudo-replay; None in the first task, or to leave it out.
    anchors (n,) bool, None = all: with a replay buffer only views of the current task are anchors
    (the asymmetric form), while all views stand in every D_i.
    r_i is no probability: its numerator is not in D_i, so it can exceed 1 in small batches. There
    1 - r_i is clamped at 0: the view has reached its prototype.
    """
    old = prototypes[:0] if old_prototypes is None else old_prototypes
    keys = torch.cat([z, old])                                                  # (n+m, d)
    key_labels = torch.cat([labels, labels.new_full((len(old),), -1)])          # no one's positives
    own = (z * prototypes[labels]).sum(1)                                       # (n,)  z_i.p_yi
    anchors = torch.ones_like(labels) if anchors is None else anchors           # (n,)

    def loss_of(rows, own, keys):
        logits = without_self(similarities(keys[rows], keys, tau), rows)        # (b, n+m)
        log_D = logits.logsumexp(1)                                             # (b,)
        log_c = logits - log_D[:, None]                                         # (b, n+m)
        log_r = own[rows] / tau - log_D                                         # (b,)
        log_r = log_r.clamp(max=0) if gamma else log_r

        positive = positives(key_labels, rows)                                  # (b, n+m)
        terms = (focal(log_c, gamma) * positive).sum(1) + focal(log_r, gamma)   # (b,)
        return -terms / (positive.sum(1) + 1) * anchors[rows]

    return sum_over_rows(loss_of, own, keys) / anchors.sum().clamp(min=1)


def supcon_loss(z, labels, anchors=None, *, tau):
    """Supervised contrastive loss (Eq. 3-4), in Co2L's asymmetric form where `anchors` is given.

        loss_i = -1/|P(i)| sum_{j in P(i)} log( exp(z_i.z_j/tau) / sum_{k != i} exp(z_i.z_k/tau) )

    A mean over the anchors (n,) bool (None = all) that have a positive.
    """
    count = (labels[:, None] == labels).sum(1) - 1                              # (n,)  |P(i)|
    counts = count > 0 if anchors is None else anchors & (count > 0)            # (n,)

    def loss_of(rows, z):
        log_c = without_self(similarities(z[rows], z, tau), rows).log_softmax(1)    # (b, n)
        mean = (log_c * positives(labels, rows)).sum(1) / count[rows].clamp(min=1)
        return -mean * counts[rows]                                             # (b,)

    return sum_over_rows(loss_of, z) / counts.sum().clamp(min=1)


def ird_loss(z, z_past, *, kappa_current, kappa_past):
    """Instance-wise Relation Distillation (Eq. 10, first term): keep relations between samples.

        o_ij = softmax over j != i of z_i.z_j/kappa;  loss_i = - sum_j o_ij(past) log o_ij(current)
    """
    z_past = z_past.detach()

    def loss_of(rows, z):
        past = without_self(similarities(z_past[rows], z_past, kappa_past), rows)   # (b, n)
        current = without_self(similarities(z[rows], z, kappa_current), rows)       # (b, n)
        return -(past.softmax(1) * current.log_softmax(1)).sum(1)                   # (b,)

    return sum_over_rows(loss_of, z) / len(z)


def sprd_loss(z, z_past, prototypes, *, zeta_current, zeta_past):
    """Sample-Prototype Relation Distillation (Eq. 10, second term): keep relations to P_1:t.

        q_is = softmax over s of z_i.p_s/zeta;        loss_i = - sum_s q_is(past) log q_is(current)

    prototypes (S, d): those of all classes seen so far, the current task's included.
    """
    past = similarities(z_past, prototypes, zeta_past)                        # (n, S)
    current = similarities(z, prototypes, zeta_current)                       # (n, S)
    return -(past.softmax(1).detach() * current.log_softmax(1)).sum(1).mean()


def hsd_alpha(epoch, epochs, warmup_epochs):
    """alpha = max(0, (e - e0) / E) of Eq. 10, e = 1..E: IRD alone, then more and more S-PRD."""
    return max(0.0, (epoch - warmup_epochs) / epochs)


def hsd_loss(z, z_past, prototypes, alpha, *, kappa_current, kappa_past, zeta_current, zeta_past):
    """Hardness-Softness Distillation (Eq. 10): (1 - alpha) L_IRD + alpha L_S-PRD.

    alpha = 0 is IRD alone (Co2L's distillation), alpha = 1 is S-PRD alone.
    """
    sprd = sprd_loss(z, z_past, prototypes, zeta_current=zeta_current, zeta_past=zeta_past)
    if alpha == 1:
        return sprd
    ird = ird_loss(z, z_past, kappa_current=kappa_current, kappa_past=kappa_past)
    return (1 - alpha) * ird + alpha * sprd
