"""Classification scores for each class, such as recall, precision and AUROC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch

from pyrofl.inference.evaluation.predict import predict
from pyrofl.inference.evaluation.specification import EvaluationFields
from pyrofl.inference.fitted_run.run import Run
from pyrofl.turns import synchronized

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pandas import DataFrame

ALL = "all"


@synchronized
def classification_report(run: Run, **asked: Unpack[EvaluationFields]) -> DataFrame:
    """Return recall, precision and AUROC of each class, over the rows of all clients.

    Args:
        run: fitted run of a classifier.
        asked: fields of `evaluate`; seed and draws are the run's by default.

    Returns:
        A data frame with a row for each class, and "all": `rows`; `recall` (for "all" the balanced
        accuracy, the mean over classes with rows); `precision`; `auroc` and `average_precision` of
        the class's probability against all other rows; for "all", means over classes. NaN marks
        undefined scores, as of a class without rows or predictions.

    Raises:
        ValueError: as `evaluate`; or if the method is not a classifier.

    Examples:
        >>> import pyrofl
        >>> from pyrofl import datasets, federations, nets
        >>> from pyrofl.models import pfedvem
        >>> data = federations.split(datasets.load("digits"), "slices:5", clients=4)
        >>> method = pfedvem.build(nets.build("softmax", (64,), 10))
        >>> run = pyrofl.fit(method, data, rounds=1, progress=False)
        >>> classification_report(run).columns.tolist()
        ['rows', 'recall', 'precision', 'auroc', 'average_precision']
    """
    how: EvaluationFields = {"seed": run.seed, "draws": run.draws, **asked}
    predictions = list(predict(run.method, run.data, run.state, **how))
    if predictions[0].prediction.mean.dim() < 3:
        raise ValueError("the method predicts numbers; classification_report needs a classifier")
    probs = torch.cat([one.prediction.mean[one.mask] for one in predictions]).double().cpu().numpy()
    y = torch.cat([one.y[one.mask] for one in predictions]).long().cpu().numpy()
    return scores_by_class(probs, y, run.data.classes or ("0", "1"))


def scores_by_class(probs: NDArray[Any], y: NDArray[Any], classes: Sequence[str]) -> DataFrame:
    """Return recall, precision and AUROC of each class, from class probabilities [N, K]."""
    from pandas import DataFrame
    from sklearn.metrics import average_precision_score, roc_auc_score

    top = probs.argmax(1)
    lines = {}
    for k, name in enumerate(classes):
        is_class, said = y == k, top == k
        has_both = 0 < is_class.sum() < len(y)
        lines[name] = {
            "rows": int(is_class.sum()),
            "recall": said[is_class].mean() if is_class.any() else np.nan,
            "precision": is_class[said].mean() if said.any() else np.nan,
            "auroc": roc_auc_score(is_class, probs[:, k]) if has_both else np.nan,
            "average_precision": average_precision_score(is_class, probs[:, k])
            if has_both
            else np.nan,
        }
    means = DataFrame.from_dict(lines, orient="index").mean().to_dict()
    whole = ALL if ALL not in classes else f"{ALL} classes"
    return DataFrame.from_dict({**lines, whole: {**means, "rows": len(y)}}, orient="index")
