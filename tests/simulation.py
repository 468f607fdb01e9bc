"""What the methods do, in NumPy and for all workers at once: expected values."""

import numpy as np


def top_k(x, k):
    """Rows of ``x`` with all but their k largest entries set to zero."""
    order = np.argsort(-np.abs(x), axis=1, kind="stable")[:, :k]
    sent = np.zeros_like(x)
    np.put_along_axis(sent, order, np.take_along_axis(x, order, 1), 1)
    return sent


def error_feedback(grads, k, decay=1.0):
    """Means and final residuals for gradients [steps, workers, n]."""
    residual, means = np.zeros(grads.shape[1:]), []
    for g in grads:
        x = g + decay * residual
        sent = top_k(x, k)
        residual = x - sent
        means.append(sent.mean(0))
    return np.stack(means), residual


def momentum_correction(grads, k, momentum, nesterov, masking):
    """DGC, algorithm 1 and section 3.1: means, final velocity and momentum."""
    u, v, means = np.zeros(grads.shape[1:]), np.zeros(grads.shape[1:]), []
    for g in grads:
        if nesterov:
            u = momentum * (u + g)
            v = v + u + g
        else:
            u = momentum * u + g
            v = v + u
        sent = top_k(v, k)
        mask = sent == 0
        v = v * mask
        if masking:
            u = u * mask
        means.append(sent.mean(0))
    return np.stack(means), v, u
