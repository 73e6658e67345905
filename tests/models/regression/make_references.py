"""Estimates of the problems, and Kaplan-Meier curves, by statsmodels and lifelines.

They are in references.json.

Run `PYTHONPATH=tests python tests/models/regression/make_references.py` where statsmodels and
lifelines are installed.
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
from regression_problems import BOUNDS, PROBLEMS, frames


def main():
    """Fit all problems, and write the estimates and the versions of the packages."""
    import statsmodels.api as sm
    import statsmodels.discrete.truncated_model as truncated
    from lifelines import CoxPHFitter, WeibullAFTFitter
    from statsmodels.duration.hazard_regression import PHReg
    from statsmodels.miscmodels.ordinal_model import OrderedModel
    from statsmodels.othermod.betareg import BetaModel

    table = pd.concat([frame.assign(client=name) for name, frame in frames().items()])
    table = table.reset_index(drop=True)
    design = pd.DataFrame({"x": table["x"], "g[yes]": 1.0 * (table["g"] == "yes")})
    whole = sm.add_constant(design).rename(columns={"const": "Intercept"})
    gaussian, poisson = sm.families.Gaussian(), sm.families.Poisson()
    seen, time = table["seen"], table["time"]

    def glm(y, family, **how):
        return sm.GLM(y, whole, family=family, **how).fit()

    def told(fit, names=None):
        """Return name -> estimate and standard error."""
        names = list(whole.columns) if names is None else names
        values, errors = np.asarray(fit.params).ravel("F"), np.asarray(fit.bse).ravel("F")
        return {n: [float(v), float(s)] for n, v, s in zip(names, values, errors, strict=False)}

    def weibull(bounds="", entry=None):
        """Return log hazard ratios: -shape times the coefficients of log scales."""
        frame = whole.assign(time=time, seen=seen)
        fitter = WeibullAFTFitter(fit_intercept=False)
        if bounds:
            frame = whole.assign(low=table[bounds], high=time.where(seen == 1, np.inf))
            fit = fitter.fit_interval_censoring(frame, "low", "high")
        elif entry:
            fit = fitter.fit(frame.assign(entry=table[entry]), "time", "seen", entry_col="entry")
        else:
            fit = fitter.fit(frame, "time", "seen")
        shape = float(np.exp(fit.params_["rho_", "Intercept"]))
        found = {}
        cov = fit.variance_matrix_
        for name in whole.columns:
            b = float(fit.params_["lambda_", name])
            slope = np.array([-shape, -shape * b])
            keys = [("lambda_", name), ("rho_", "Intercept")]
            part = cov.loc[keys, keys].to_numpy()
            found[name] = [-shape * b, float(np.sqrt(slope @ part @ slope))]
        return found

    def cox(entry):
        """Return log hazard ratios, stratified by client."""
        frame = design.assign(time=time, seen=seen, entry=table[entry], client=table["client"])
        fit = CoxPHFitter().fit(frame, "time", "seen", strata="client", entry_col="entry")
        return {n: [float(fit.params_[n]), float(fit.standard_errors_[n])] for n in design}

    positive = table["hurdle"] > 0
    fits = {
        "gaussian": lambda: told(sm.OLS(table["y"], whole).fit()),
        "gaussian, weights": lambda: told(glm(table["y"], gaussian, freq_weights=table["copies"])),
        "gaussian, offset": lambda: told(sm.OLS(table["y"] - table["exposure"], whole).fit()),
        "lognormal": lambda: told(sm.OLS(np.log(table["lasting"]), whole).fit()),
        "logit": lambda: told(sm.Logit(table["died"], whole).fit(disp=0)),
        "probit": lambda: told(sm.Probit(table["died"], whole).fit(disp=0)),
        "binomial": lambda: told(
            glm(
                np.column_stack([table["wins"], table["trials"] - table["wins"]]),
                sm.families.Binomial(),
            )
        ),
        "poisson, offset": lambda: told(glm(table["count"], poisson, offset=table["log_exposure"])),
        "poisson, weights": lambda: told(
            glm(table["inflated"], poisson, freq_weights=table["copies"])
        ),
        "negative binomial": lambda: told(sm.NegativeBinomial(table["spread"], whole).fit(disp=0)),
        "zero inflated": lambda: told(
            sm.ZeroInflatedPoisson(table["inflated"], whole).fit(disp=0, maxiter=500),
            ["zero", *whole.columns],
        ),
        "hurdle": lambda: told(
            truncated.TruncatedLFPoisson(table["hurdle"][positive], whole[positive]).fit(disp=0)
        ),
        "gamma": lambda: told(glm(table["cost"], sm.families.Gamma(sm.families.links.Log()))),
        "beta": lambda: told(BetaModel(table["share"], whole).fit(disp=0)),
        "ordinal": lambda: told(
            OrderedModel(table["grade"].astype("category"), design, distr="logit").fit(
                method="bfgs", disp=0
            ),
            list(design.columns),
        ),
        "categorical": lambda: told(
            sm.MNLogit(table["cause"].astype("category").cat.codes, whole).fit(disp=0),
            [f"{n} ({c})" for c in "bc" for n in whole.columns],
        ),
        "exponential": lambda: told(glm(seen, poisson, offset=np.log(time))),
        "weibull": weibull,
        "weibull, entry": lambda: weibull(entry="entry"),
        "weibull, interval": lambda: weibull("after"),
        "cox, entry": lambda: cox("entry"),
        "cox": lambda: told(
            PHReg(time, design, status=seen, strata=table["client"], ties="efron").fit(),
            list(design.columns),
        ),
    }
    found = {name: fits[name]() for name in PROBLEMS}
    for values in found.values():
        values.pop("zero", None)
    packages = {name: version(name) for name in ("statsmodels", "lifelines", "numpy")}
    place = Path(__file__).with_name("references.json")
    found = {"packages": packages, "estimates": found, "kaplan_meier": kaplan_meier(table)}
    place.write_text(json.dumps(found, indent=1) + "\n")


def kaplan_meier(table):
    """Return survival and band by client and of all rows, of times rounded up to bounds."""
    from lifelines import KaplanMeierFitter

    parts = {**{name: part for name, part in table.groupby("client")}, "all": table}
    found = {}
    for name, part in parts.items():
        ends = np.array([*BOUNDS, np.inf])[np.searchsorted(BOUNDS, part["time"])]
        seen = part["seen"] * np.isfinite(ends)
        fit = KaplanMeierFitter().fit(np.where(np.isfinite(ends), ends, 1e6), seen)
        curves = [fit.survival_function_, fit.confidence_interval_]
        columns = pd.concat(curves, axis=1).loc[BOUNDS].to_numpy().T.tolist()
        found[name] = dict(zip(("survival", "low", "high"), columns, strict=True))
    return found


if __name__ == "__main__":
    main()
