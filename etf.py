"""Fixed class prototypes: vertices of a simplex equiangular tight frame (Definition 1, Eq. 1-2).

K unit vectors in R^d with pairwise inner products -1/(K-1), the smallest that K vectors can share.
They are drawn once, before the first task, and never trained; row k belongs to class k for good, so
`prototypes[labels]` is all the look-up there is. Needs torch only.
"""

import torch


def simplex_etf(num_classes, dim, seed=0):
    """Return the (num_classes, dim) float32 prototypes, randomly oriented by `seed`.

    Eq. 1 writes Q = sqrt(K/(K-1)) U (I - 11^T/K) with orthonormal U (d, K), which needs K <= d. The
    K vertices only span the K-1 dimensions orthogonal to the ones vector: placing that subspace in
    R^d instead of all of R^K gives the same frame and reaches the definition's limit, K = d+1.
    """
    K, d = num_classes, dim
    if K < 2:
        raise ValueError(f"a simplex needs at least 2 prototypes, got {K}")
    if K > d + 1:
        raise ValueError(f"{K} prototypes need at least {K - 1} dimensions, got {d}")
    generator = torch.Generator().manual_seed(seed)
    centering = torch.eye(K, dtype=torch.float64) - 1 / K            # (K, K)  I - 11^T/K
    basis, _ = torch.linalg.qr(centering[:, :-1])                    # (K, K-1), spans its range
    gaussian = torch.randn(d, K - 1, dtype=torch.float64, generator=generator)
    U, R = torch.linalg.qr(gaussian)                                 # (d, K-1), U^T U = I
    U = U * R.diagonal().sign()                                      # uniform, whatever LAPACK's signs
    return ((K / (K - 1)) ** 0.5 * basis @ U.T).float()              # (K, d)
