"""The losses as pure functions: FNC2 (Eq. 7-9) learns a task, HSD (Eq. 10) keeps the old ones.

Also the parts that the paper's ablations combine: SupCon (Eq. 3) with IRD is Co2L.
Conventions, the same everywhere:
  z           (n, d) unit embeddings of the n = 2N views of a batch (N images, two views each)
  z_past      (n, d) unit embeddings of the same views by the frozen model of the previous task
  labels      (n,)   class of each view; row k of `prototypes` belongs to class k
  prototypes  (K, d) unit rows, see etf.py
Every loss is a mean over all n views, not the paper's sum, which would tie the learning rate to the
batch size. Similarities and softmaxes are float32 even under autocast: at kappa 0.01 one bfloat16
step is 0.4 nats. Needs torch only.
"""

import torch
import torch.nn.functional as F


def similarities(a, b, temperature):
    """a_i . b_j / temperature: (n, d), (m, d) -> (n, m), in float32 or better."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return a.to(dtype) @ b.to(dtype).T / temperature


def off_diagonal(matrix):
    """(n, n) -> (n, n-1): every row i without its entry i: no view is compared with itself."""
    n = len(matrix)
    return matrix.flatten()[1:].view(n - 1, n + 1)[:, :-1].reshape(n, n - 1)


def positives(labels):
    """P(i) of Eq. 4: (n,) -> (n, n-1) bool, True where the other view has the same label."""
    return off_diagonal(labels[:, None] == labels)


def focal(log_p, gamma):
    """(1 - p)^gamma log p, elementwise; gradients flow through the weight too, as in focal loss."""
    hardness = -torch.expm1(log_p)                                      # 1 - p
    # not below eps: 0^gamma has no finite gradient for gamma < 1, and log p is 0 there anyway
    return hardness.clamp(min=torch.finfo(log_p.dtype).eps) ** gamma * log_p


def fnc2_loss(z, labels, prototypes, old_prototypes=None, anchors=None, *, tau, gamma):
    """Focal Neural Collapse Contrastive loss (Eq. 7-9).

        D_i    = sum_{k != i} exp(z_i.z_k / tau) + sum_{p in P_1:t-1} exp(z_i.p / tau)
        c_ij   = exp(z_i.z_j / tau) / D_i              for the positives j in P(i)
        r_i    = exp(z_i.p_yi / tau) / D_i             for the view's own prototype
        loss_i = -1/(|P(i)|+1) * ( sum_j (1-c_ij)^gamma log c_ij + (1-r_i)^gamma log r_i )

    old_prototypes (m, d): P_1:t-1, the pseudo-replay; None in the first task, or to leave it out.
    anchors (n,) bool, None = all: with a replay buffer only views of the current task are anchors
    (the asymmetric form). The others stand in every D_i and count 0 in the mean.
    r_i is no probability: its numerator is not in D_i, so it can exceed 1 in small batches. There
    1 - r_i is clamped at 0 (for gamma > 0): the view has reached its prototype.
    """
    old = prototypes[:0] if old_prototypes is None else old_prototypes
    logits = off_diagonal(similarities(z, z, tau))                              # (n, n-1)
    log_D = torch.cat([logits, similarities(z, old, tau)], 1).logsumexp(1)      # (n,)
    log_c = logits - log_D[:, None]                                             # (n, n-1)
    own = F.embedding(labels, prototypes)       # (n, d) prototypes[labels], but refuses label -1
    log_r = (z * own).sum(1) / tau - log_D                                      # (n,)
    log_r = log_r.clamp(max=0) if gamma else log_r

    positive = positives(labels)                                                # (n, n-1)
    terms = (focal(log_c, gamma) * positive).sum(1) + focal(log_r, gamma)       # (n,)
    loss = -terms / (positive.sum(1) + 1)
    return (loss if anchors is None else loss * anchors).mean()


def supcon_loss(z, labels, anchors=None, *, tau):
    """Supervised contrastive loss (Eq. 3-4), in Co2L's asymmetric form where `anchors` is given.

        loss_i = -1/|P(i)| sum_{j in P(i)} log( exp(z_i.z_j/tau) / sum_{k != i} exp(z_i.z_k/tau) )

    Views that are no anchors (n,) bool, None = all, or have no positive count 0 in the mean.
    """
    log_c = off_diagonal(similarities(z, z, tau)).log_softmax(1)                # (n, n-1)
    positive = positives(labels)                                                # (n, n-1)
    loss = -(log_c * positive).sum(1) / positive.sum(1).clamp(min=1)            # (n,)
    return (loss if anchors is None else loss * anchors).mean()


def ird_loss(z, z_past, *, kappa_current, kappa_past):
    """Instance-wise Relation Distillation (Eq. 10, first term): keep relations between samples.

        o_ij = softmax over j != i of z_i.z_j/kappa;  loss_i = - sum_j o_ij(past) log o_ij(current)
    """
    past = off_diagonal(similarities(z_past, z_past, kappa_past)).softmax(1).detach()   # (n, n-1)
    current = off_diagonal(similarities(z, z, kappa_current)).log_softmax(1)            # (n, n-1)
    return -(past * current).sum(1).mean()


def sprd_loss(z, z_past, prototypes, *, zeta_current, zeta_past):
    """Sample-Prototype Relation Distillation (Eq. 10, second term): keep relations to P_1:t.

        q_is = softmax over s of z_i.p_s/zeta;        loss_i = - sum_s q_is(past) log q_is(current)

    prototypes (S, d): those of all classes seen so far, the current task's included.
    """
    past = similarities(z_past, prototypes, zeta_past).softmax(1).detach()      # (n, S)
    current = similarities(z, prototypes, zeta_current).log_softmax(1)          # (n, S)
    return -(past * current).sum(1).mean()


def hsd_alpha(epoch, epochs, warmup_epochs):
    """alpha = max(0, (e - e0) / E) of Eq. 10, e = 1..E: IRD alone, then more and more S-PRD."""
    return max(0.0, (epoch - warmup_epochs) / epochs)


def hsd_loss(z, z_past, prototypes, alpha, *, kappa_current, kappa_past, zeta_current, zeta_past):
    """Hardness-Softness Distillation (Eq. 10): (1 - alpha) L_IRD + alpha L_S-PRD.

    alpha = 0 is IRD alone (Co2L's distillation), alpha = 1 S-PRD alone; the other is not computed.
    """
    loss = 0.0
    if alpha < 1:
        loss = (1 - alpha) * ird_loss(z, z_past, kappa_current=kappa_current, kappa_past=kappa_past)
    if alpha > 0:
        loss = loss + alpha * sprd_loss(z, z_past, prototypes, zeta_current=zeta_current,
                                        zeta_past=zeta_past)
    return loss
