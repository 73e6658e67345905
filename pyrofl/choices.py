"""Words that arguments and options accept, with their descriptions.

This module imports nothing of the package, so that the command line can print help and refuse
options without loading torch.
"""

import re
from collections.abc import Mapping
from typing import Literal

Missing = Literal["error", "drop", "impute"]
"""Treatment of rows with missing values: raise an error, drop them, or replace gaps of features
by the mean of the training rows and add an indicator feature."""

Scaling = Literal["standardize", "none"]
"""Whether columns of numbers get mean 0 and standard deviation 1 over the training rows."""

OnBadMessage = Literal["reject", "raise"]
Engine = Literal["local", "ray"]
Until = Literal["converged"]
HierarchicalMethod = Literal["auto", "likelihood_factors", "pvi"]
"""Method of a hierarchical program; "auto" may switch from likelihood factors to PVI."""

Logger = Literal["tensorboard", "mlflow"]
Metric = Literal["accuracy", "nll", "rmse"]
"""Metric that selects settings."""

RowScore = Literal["accuracy", "error", "log_score", "crps"]
"""Score of single rows."""

GROUPS: tuple[str, ...] = ("posterior", "prior", "prior_predictive", "posterior_predictive")
GROUPS += ("log_likelihood", "log_prior", "observed_data", "constant_data", "sample_stats")
"""ArviZ groups of posterior.nc."""

MIN_SCORED_ROWS = 5  # small counts are suppressed, as in statistics of patients

FAMILIES = (
    "gaussian",
    "student",
    "skew_normal",
    "asym_laplace",
    "bernoulli",
    "binomial",
    "beta_binomial",
    "poisson",
    "negative_binomial",
    "zero_inflated_poisson",
    "zero_inflated_negative_binomial",
    "hurdle_poisson",
    "hurdle_negative_binomial",
    "hurdle_gamma",
    "gamma",
    "lognormal",
    "beta",
    "zero_one_inflated_beta",
    "cumulative",
    "sratio",
    "acat",
    "categorical",
    "exponential",
    "weibull",
    "cox",
)
"""Families of the responses of a regression."""

IMAGES: dict[str, str] = {
    "mnist": "handwritten digits, 60,000 + 10,000 gray 28 x 28",
    "fashion_mnist": "articles of clothing, 60,000 + 10,000 gray 28 x 28, 10 classes",
    "emnist": "handwritten digits and letters, 697,932 + 116,323 gray 28 x 28, 62 classes",
    "usps": "handwritten digits, 7,291 + 2,007 gray 16 x 16",
    "svhn": "house numbers, 73,257 + 26,032 color 32 x 32, 10 classes",
    "cifar10": "50,000 + 10,000 color 32 x 32, 10 classes",
    "cifar100": "50,000 + 10,000 color 32 x 32, 100 classes",
    "cifar100-coarse": "the same, 20 superclasses to predict and 100 fine types to partition by",
}

MANUAL: dict[str, str] = {
    "femnist": "characters by writer, LEAF's JSON files, gray 28 x 28, 62 classes",
    "celeba": "faces by celebrity, LEAF's JSON files, color 84 x 84, smiling or not",
    "digit_five": "digits of five domains, .mat files, color 32 x 32, 10 classes",
    "sun397": "scenes, 80 + 20 of each of 397 classes, color 64 x 64",
    "sun397-coarse": "3 superclasses to predict, 150 types to partition by",
    "cinic10": "90,000 + 90,000 color 32 x 32, 10 classes",
}
"""Data sets that users download themselves; examples/docs/image_data.md states their folders."""

DATASETS: dict[str, str] = {
    "digits": "handwritten digits, 1,347 + 450 rows of 8 x 8 pixels, 10 classes; comes along",
    "eight_schools": "effects of coaching in eight schools (Rubin 1981); comes along",
    "baseball": "hits of 18 batters in 45 at-bats, tested on the rest of 1970; comes along",
    "rat_tumours": "rats with a tumour in 71 experiments (Tarone 1982); comes along",
    "gaussian": "synthetic: clients with Gaussian likelihoods of different widths, exact posterior",
    "linear": "synthetic: a linear regression per client around a common one",
    **{name: f"{about}; downloaded" for name, about in IMAGES.items()},
    **{name: f"{about}; files in --data-dir" for name, about in MANUAL.items()},
    "npz:PATH": "images in a file with arrays images (or jpeg, offsets), labels, is_test, classes",
    "csv:PATH": "a table (CSV, Parquet) with or without a group column; A,B or a folder: sites",
    "NAME+NAME": "several of these (no csv) as domains of one: all rows, all classes",
}

LIKELIHOODS: dict[str, str] = {
    "categorical": "classes",
    "normal": "a number; noise of a learned SD (1 in flower projects), or normal:SD if it is known",
    "normal_known_sd": "a number whose standard error is the first feature",
    "bernoulli": "0 or 1",
    "binomial": "successes out of the first feature's trials, or of N: binomial:N",
    "poisson": "a count",
}

_PARTITIONS = (
    "iid: all rows at random, equal sizes",
    "dirichlet:A[,min=M][,balance]: class shares from Dirichlet(A), at least M rows each",
    "labels:S: at most S labels per client, in equal shards",
    "label-groups:S: exactly S labels per client, groups of clients cover all, equal cuts",
    "slices:S[,independent]: label groups cut at random points, so that sizes differ widely",
    "drift[,independent][,equal]: one fine class of every superclass, cut at random points",
    "step:M[,minor=R]: M large classes per client and R rows of every other",
    "shares:S: S random classes per client, in U(0.3, 0.7) shares",
    "groups[:COLUMN]: the natural groups of the data set, one client each",
    "domains:PARTITION: clients alternate between domains; PARTITION within each domain",
)
PARTITIONS: dict[str, str] = {re.split(r"[:\[]", line)[0]: line for line in _PARTITIONS}

TEST_POLICIES: dict[str, str] = {
    "same_shares": "test rows of each class in proportion to the client's training rows of it",
    "same_classes": "all test rows of the classes that the client trains on",
    "independent": "the same kind of partition, drawn independently for the test rows",
    "uniform": "test rows at random",
}

DEPTHS = {f"resnet{depth}": depth for depth in (20, 32, 44, 56)}

NETWORKS: Mapping[str, str] = {
    "softmax": "one linear layer: softmax or linear regression",
    "mlp": "mlp:200,100: fully connected, hidden layers of these widths (mlp alone: 100), ReLU",
    "mean": "one number w that ignores x: intercept model, as in meta-analysis",
    "linear": "x @ w without intercept: conjugate tasks",
    "cnn-pfedvem": "pFedVEM on CIFAR-10: conv 16, 32, fully connected 120, 84",
    "cnn-pfedvem-100": "pFedVEM on CIFAR-100: conv 32, 64, 128, 256, 100, averaged over the image",
    "cnn-pfedmb": "pFedMB: conv 6, 16, fully connected 120, 84",
    "cnn-metavd": "MetaVD: three conv of width h (64, or cnn-metavd:256), fully connected 4h, 2h",
    "cnn-fedbe": "FedBE: conv 32, 64, 64, fully connected 64, Xavier initialization",
    "cnn-fedbe-gn": "the same with GroupNorm after every conv",
    "cnn-fedabml": "FedABML on CIFAR-10: conv 64, 64, fully connected 120, 64",
    **{
        name: f"ResNet for CIFAR, {d} layers, GroupNorm for BatchNorm" for name, d in DEPTHS.items()
    },
}
