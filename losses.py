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

SELF = -1e9     # in place of z_i.z_i: no weight in a softmax and, unlike -inf, 0 * SELF is not nan


def similarities(a, b, temperature):
    """a_i . b_j / temperature: (n, d), (m, d) -> (n, m), in float32 or better."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return (a.to(dtype) / temperature) @ b.to(dtype).T


def positives(labels):
    """P(i) of Eq. 4 as a 0/1 matrix (n, n): same label, not the view itself."""
    return (labels[:, None] == labels).float().fill_diagonal_(0)


def focal(log_p, gamma):
    """(1 - p)^gamma log p, elementwise; gradients flow through the weight too, as in focal loss.

    r_i of Eq. 9 is no probability: its numerator is not in its denominator, so it can exceed 1 in
    small batches. There 1 - p is clamped at 0: the view has reached its prototype.
    """
    if gamma == 0:
        return log_p
    log_p = log_p.clamp(max=0)
    hardness = (1 - log_p.exp()).clamp(min=torch.finfo(log_p.dtype).eps) # x^0.5: no slope at 0
    return hardness ** gamma * log_p


def mean_over(loss, counts):
    """Mean of loss (n,) over the views that count, (n,) bool; 0 if none does."""
    return (loss * counts).sum() / counts.sum().clamp(min=1)


def fnc2_loss(z, labels, prototypes, old_prototypes=None, anchors=None, *, tau, gamma):
    """Focal Neural Collapse Contrastive loss (Eq. 7-9), a mean over anchors.

        D_i    = sum_{k != i} exp(z_i.z_k / tau) + sum_{p in P_1:t-1} exp(z_i.p / tau)
        c_ij   = exp(z_i.z_j / tau) / D_i              for the positives j in P(i)
        r_i    = exp(z_i.p_yi / tau) / D_i             for the view's own prototype
        loss_i = -1/(|P(i)|+1) * ( sum_j (1-c_ij)^gamma log c_ij + (1-r_i)^gamma log r_i )

    old_prototypes (m, d): P_1:t-1, the pseudo-replay; None in the first task, or to leave it out.
    anchors (n,) bool, None = all: with a replay buffer only views of the current task are anchors
    (the asymmetric form), while all views stand in every D_i.
    """
    n = len(z)
    keys = z if old_prototypes is None else torch.cat([z, old_prototypes])  # (n+m, d)
    logits = similarities(z, keys, tau).fill_diagonal_(SELF)                  # (n, n+m)
    log_D = logits.logsumexp(1)                                               # (n,)
    log_c = logits[:, :n] - log_D[:, None]                                    # (n, n)
    log_r = (z * prototypes[labels]).sum(1).to(log_D.dtype) / tau - log_D     # (n,)

    positive = positives(labels)                                              # (n, n)
    terms = (focal(log_c, gamma) * positive).sum(1) + focal(log_r, gamma)     # (n,)
    loss = -terms / (positive.sum(1) + 1)
    return mean_over(loss, torch.ones_like(labels) if anchors is None else anchors)


def supcon_loss(z, labels, anchors=None, *, tau):
    """Supervised contrastive loss (Eq. 3-4), in Co2L's asymmetric form where `anchors` is given.

        loss_i = -1/|P(i)| sum_{j in P(i)} log( exp(z_i.z_j/tau) / sum_{k != i} exp(z_i.z_k/tau) )

    A mean over the anchors (n,) bool (None = all) that have a positive.
    """
    log_c = similarities(z, z, tau).fill_diagonal_(SELF).log_softmax(1)       # (n, n)
    positive = positives(labels)                                              # (n, n)
    count = positive.sum(1)                                                   # (n,)  |P(i)|
    loss = -(log_c * positive).sum(1) / count.clamp(min=1)
    return mean_over(loss, count > 0 if anchors is None else anchors & (count > 0))


def ird_loss(z, z_past, *, kappa_current, kappa_past):
    """Instance-wise Relation Distillation (Eq. 10, first term): keep relations between samples.

        o_ij = softmax over j != i of z_i.z_j/kappa;  loss_i = - sum_j o_ij(past) log o_ij(current)
    """
    past = similarities(z_past, z_past, kappa_past).fill_diagonal_(SELF)      # (n, n)
    current = similarities(z, z, kappa_current).fill_diagonal_(SELF)          # (n, n)
    return -(past.softmax(1).detach() * current.log_softmax(1)).sum(1).mean()


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
    ird = ird_loss(z, z_past, kappa_current=kappa_current, kappa_past=kappa_past)
    sprd = sprd_loss(z, z_past, prototypes, zeta_current=zeta_current, zeta_past=zeta_past)
    return (1 - alpha) * ird + alpha * sprd
