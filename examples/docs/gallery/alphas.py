"""The clients of a pair learn to use the same branch."""

import numpy as np
from papers import plots

random, rounds = np.random.default_rng(0), 15
target = np.repeat(np.eye(3), 2, axis=0)
time = 1 / (1 + np.exp(-(np.arange(rounds)[:, None, None] - 6) / 1.5))
weights = (1 - time) / 3 + time * (0.9 * target + 0.1 / 3)
weights += random.normal(0, 0.01, weights.shape)
names = [f"pair {j // 2 + 1}" for j in range(6)]
figure = plots.alphas({"one alpha for all layers": weights / weights.sum(2, keepdims=True)}, names)
