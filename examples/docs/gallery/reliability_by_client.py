"""A client is calibrated if its confidence is inside the interval of its accuracy."""

import torch

from pyrofl import figures
from pyrofl.metrics import calibration_bins

torch.manual_seed(0)
bins = {}
for j, rows in enumerate((15, 30, 60, 120, 300)):
    sure = 1 - 0.4 * torch.rand(rows) ** 2
    right = (torch.rand(rows) < sure - 0.2 * (j == 4)).float()
    bins[f"client {j}"] = calibration_bins(sure, right, bins=5)
figure = figures.reliability_by_client(bins)
