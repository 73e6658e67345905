"""Below the diagonal the model is overconfident."""

import torch

from pyrofl import figures
from pyrofl.metrics import calibration_bins

torch.manual_seed(0)
sure = 0.3 + 0.7 * torch.rand(2000)
models = {"too sure": sure**2, "calibrated": sure}
bins = {
    name: calibration_bins(sure, (torch.rand(2000) < chance).float(), bins=10)
    for name, chance in models.items()
}
figure = figures.reliability(bins)
