"""Residual networks for small images, with GroupNorm where the originals have BatchNorm.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2; Wu
and He, "Group Normalization", ECCV 2018.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import pad

DEPTHS = {f"resnet{depth}": depth for depth in (20, 32, 44, 56)}

GROUP = 8  # channels normalised together


def norm(channels: int) -> nn.Module:
    """Return the GroupNorm of this many channels."""
    return nn.GroupNorm(max(1, channels // GROUP), channels)


class Block(nn.Module):
    """Two convolutions beside a shortcut without parameters (option A)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        """Take the channels before and after."""
        super().__init__()
        self.stride, self.missing = stride, after - before
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = norm(after)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, height / stride, width / stride]."""
        inner = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        left = self.missing // 2
        shortcut = pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, left, self.missing - left)
        )
        result: Tensor = (inner + shortcut).relu()
        return result


def layers(depth: int, channels: int, outputs: int) -> dict[str, nn.Module]:
    """Return the layers by name: a convolution, three stages of 16, 32, 64 channels, the head.

    Args:
        depth: 6 n + 2, n blocks in a stage.
        channels: of the images.
        outputs: classes.
    """
    found: dict[str, nn.Module] = {
        "conv": nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        "norm": norm(16),
        "relu": nn.ReLU(),
    }
    before = 16
    for stage, after in enumerate((16, 32, 64), 1):
        for block in range(1, (depth - 2) // 6 + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            found[f"stage{stage}_block{block}"] = Block(before, after, stride)
            before = after
    return found | {
        "average": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "head": nn.Linear(64, outputs),
    }


def he(chain: nn.Sequential) -> None:
    """Draw the weights of convolutions normal by what they put out (He et al., 2015)."""
    for layer in chain.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
