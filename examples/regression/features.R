# Fit what `features.py` fits with R packages, and write features_r.json.
#
# Each data set is written to FOLDER as CSV first, and read from there by both scripts.
#
# Run: Rscript examples/regression/features.R FOLDER
suppressMessages({
  library(glmmTMB)
  library(lme4)
  library(MASS)
  library(metafor)
  library(mgcv)
  library(nlme)
  library(nnet)
  library(ordinal)
  library(quantreg)
  library(survival)
  library(jsonlite)
})
invisible(Sys.setlocale("LC_COLLATE", "C")) # levels in the order of Python
folder <- commandArgs(trailingOnly = TRUE)[1]
dir.create(folder, showWarnings = FALSE, recursive = TRUE)
table_of <- function(name, rows) {
  path <- file.path(folder, paste0(name, ".csv"))
  write.csv(rows, path, row.names = FALSE)
  read.csv(path, stringsAsFactors = TRUE)
}
# Rows of models without groups are partitioned among three clients.
partition <- function(rows) transform(rows, client = seq_len(nrow(rows)) %% 3 + 1)

# A row of the page: the call, and a matrix of estimates and standard errors that `read` returns.
row_of <- function(fit, read = wald) {
  call <- gsub("\\s+", " ", paste(deparse(substitute(fit), 500), collapse = ""))
  found <- read(fit)
  list(call = call, estimate = as.list(found[, 1]), se = as.list(found[, 2]))
}
named <- function(names, estimate, se) {
  matrix(c(estimate, se), ncol = 2, dimnames = list(names, NULL))
}
wald <- function(m) {
  errors <- sqrt(diag(as.matrix(vcov(m))))[seq_along(coef(m))]
  named(names(coef(m)), coef(m), errors)
}
# Coefficients of the location, of `zi`, and of the parameter that dispformula models.
tmb <- function(dispersion = "shape", zeros = "zi", factor = 1) {
  function(m) {
    parts <- summary(m)$coefficients
    scales <- list(cond = 1, zi = 1, disp = factor)
    prefix <- c(cond = "", zi = paste0(zeros, " "), disp = paste0(dispersion, " "))
    rows <- lapply(names(parts)[lengths(parts) > 0], function(part) {
      found <- scales[[part]] * parts[[part]][, 1:2, drop = FALSE]
      named(paste0(prefix[[part]], rownames(found)), found[, 1], found[, 2])
    })
    do.call(rbind, rows)
  }
}
# Functions of the parameters, with standard errors by the delta method.
delta <- function(estimate, variance, f) {
  steps <- 1e-4 * sqrt(diag(variance))
  slopes <- sapply(seq_along(estimate), function(j) {
    step <- replace(0 * estimate, j, steps[j])
    (f(estimate + step) - f(estimate - step)) / (2 * steps[j])
  })
  slopes <- matrix(slopes, ncol = length(estimate))
  named(names(f(estimate)), f(estimate), sqrt(diag(slopes %*% variance %*% t(slopes))))
}

# Data.
orthodont <- table_of("orthodont", as.data.frame(Orthodont))
data(engel, soup, package = c("quantreg", "ordinal"))
engel <- transform(engel, share = foodexp / income, log_income = log(income))
engel <- table_of("engel", partition(engel))
owls <- transform(Owls, y = SiblingNegotiation, food = FoodTreatment, sex = SexParent)
owls <- table_of("owls", subset(owls, TRUE, c(y, food, sex, Nest, logBroodSize)))
calling_owls <- table_of("calling_owls", subset(owls, y > 0))
quine <- table_of("quine", partition(quine))
absent <- table_of("absent", subset(quine, Days > 0))
lung <- subset(lung, complete.cases(inst, ph.ecog), c(inst, time, status, age, sex, ph.ecog))
lung <- transform(lung, status = status - 1, ecog = ph.ecog)
# Visits every 90 days: an event is between two visits, or before the first one.
lung <- transform(lung, last = 90 * floor((time - 1) / 90), visit = 90 * ceiling(time / 90))
lung <- transform(lung, last = ifelse(status, last, time), upper = ifelse(status, visit, time))
lung <- table_of("lung", lung)
heart <- table_of("heart", transform(heart, client = id %% 3 + 1))
studies <- transform(escalc("ZCOR", ri = ri, ni = ni, data = dat.mcdaniel1994), se = sqrt(vi))
studies <- table_of("studies", subset(as.data.frame(studies), struct != ""))
admissions <- transform(as.data.frame(UCBAdmissions), y = as.integer(Admit == "Admitted"))
admissions <- table_of("admissions", partition(admissions))
mcycle <- table_of("mcycle", partition(mcycle))
esoph <- transform(esoph, alc = as.integer(alcgp) - 1, age = as.integer(agegp))
esoph <- transform(esoph, n = ncases + ncontrols)
esoph <- table_of("esoph", partition(subset(esoph, n > 0, c(alc, age, ncases, ncontrols, n))))
boston <- table_of("boston", partition(Boston))
cbpp <- table_of("cbpp", transform(cbpp, period = paste0("p", period)))
warpbreaks <- table_of("warpbreaks", partition(warpbreaks))
soup <- table_of("soup", transform(soup, SURENESS = as.integer(SURENESS), DAY = paste0("d", DAY)))
housing <- transform(housing, sat = as.integer(Sat) - 1, Sat = NULL)
housing <- transform(housing, client = (seq_along(sat) - 1) %/% 9 %% 3 + 1) # with all levels each
housing <- table_of("housing", housing)

# Survival: log hazards, survival curves and restricted means of a Weibull model.
log_hazards <- function(m, f = NULL) {
  p <- length(coef(m))
  hazards <- function(v) c(-v[1:p] / exp(v[p + 1]), shape = exp(-v[p + 1]))
  f <- if (is.null(f)) identity else f
  delta(c(coef(m), log(m$scale)), m$var, function(v) f(hazards(v)))
}
someone <- c(1, 60, 1, 1) # age 60, sex 1, ecog 1
survival_at <- function(times) {
  function(m) {
    log_hazards(m, function(v) {
      survival <- exp(-exp(sum(v[1:4] * someone)) * times^v["shape"])
      setNames(survival, paste0("S(", times, ")"))
    })
  }
}
restricted <- function(until) {
  function(m) {
    log_hazards(m, function(v) {
      survival <- function(t) exp(-exp(sum(v[1:4] * someone)) * t^v["shape"])
      c(mean = integrate(survival, 0, until, rel.tol = 1e-8)$value)
    })
  }
}
kaplan_meier <- function(m) {
  s <- summary(m, times = seq(90, 720, 90))
  good <- s$surv > 0 & s$surv < 1
  names <- outer(c("S", "low", "high"), sprintf("(%s, %g)", s$strata, s$time), paste0)
  value <- rbind(s$surv, s$lower, s$upper)[, good]
  named(c(names[, good]), c(value), rep(s$std.err[good], each = 3))
}
grid <- seq(5, 55, 5) # ms, where smooth curves are compared
curve_of <- function(m) {
  at <- predict(m, data.frame(times = grid), se.fit = TRUE, unconditional = TRUE)
  named(paste0("f(", grid, ")"), at$fit, at$se.fit)
}

# Other models.
# Gaussian process with a squared exponential covariance. Its standard deviation, length scale and
# noise have the highest restricted likelihood (Rasmussen and Williams 2006, section 2.7).
gaussian_process <- function(x, y) {
  covariance <- function(v) {
    v[1]^2 * exp(-outer(x, x, "-")^2 / (2 * v[2]^2)) + diag(v[3]^2, length(x))
  }
  loss <- function(log_v) {
    root <- chol(covariance(exp(log_v)))
    z <- forwardsolve(t(root), cbind(1, y))
    rest <- z[, 2] - z[, 1] * sum(z[, 1] * z[, 2]) / sum(z[, 1]^2)
    sum(log(diag(root))) + (log(sum(z[, 1]^2)) + sum(rest^2)) / 2
  }
  v <- exp(optim(log(c(sd(y), sd(x) / 2, sd(y) / 2)), loss)$par)
  inverse <- solve(covariance(v))
  list(x = x, y = y, v = v, inverse = inverse, mean = sum(inverse %*% y) / sum(inverse))
}
process_curve <- function(m) {
  k <- m$v[1]^2 * exp(-outer(grid, m$x, "-")^2 / (2 * m$v[2]^2))
  se <- sqrt(m$v[1]^2 - rowSums((k %*% m$inverse) * k))
  named(paste0("f(", grid, ")"), c(m$mean + k %*% m$inverse %*% (m$y - m$mean)), se)
}
location <- function(m) wald(m)[names(coef(m)), , drop = FALSE]
negative <- function(m) {
  found <- wald(m)[-(1:2), ] # without thresholds
  found[, 1] <- -found[, 1]
  found
}
only <- function(pattern) {
  function(m) {
    found <- wald(m)
    found <- found[grepl(pattern, rownames(found)), , drop = FALSE]
    rownames(found) <- sub(pattern, "", rownames(found))
    found
  }
}
cumulative <- function(m) {
  found <- coef(summary(m))
  rows <- grepl("|", rownames(found), fixed = TRUE)
  names <- rownames(found)
  names[rows] <- paste0("cutpoints[", seq_len(sum(rows)) - 1, "]")
  named(names, found[, 1], found[, 2])
}
quantile_regression <- function(m) summary(m, se = "nid")$coefficients[, 1:2]
classes <- function(m) {
  s <- summary(m)
  names <- outer(rownames(s$coefficients), colnames(s$coefficients), paste)
  named(c(names), c(s$coefficients), c(s$standard.errors))
}
meta <- function(m) {
  tau <- if (m$method == "REML") named("sd_study", sqrt(m$tau2), m$se.tau2 / 2 / sqrt(m$tau2))
  rbind(named(sub("intrcpt", "(Intercept)", rownames(m$b)), c(m$b), m$se), tau)
}
stops <- do.call(rbind, lapply(0:1, function(k) {
  transform(subset(housing, sat >= k), threshold = factor(k), stop = sat == k)
}))
X <- model.matrix(~ Infl + Type + Cont, housing)[, -1]

# Functions of coefficients, by the delta method.
difference <- function(m) {
  delta(coef(m), vcov(m), function(v) c(difference = unname(v["DeptB"] - v["DeptC"])))
}
marginal <- function(m) {
  at <- lapply(levels(admissions$Gender), function(value) {
    model.matrix(formula(m), transform(admissions, Gender = factor(value, levels(Gender))))
  })
  delta(coef(m), vcov(m), function(v) {
    means <- sapply(at, function(x) weighted.mean(plogis(x %*% v), admissions$Freq))
    setNames(c(means, diff(means)), c("Gender = Female", "Gender = Male", "Male - Female"))
  })
}
r_squared <- function(m) {
  x <- model.matrix(m)
  variance <- rbind(cbind(vcov(m), 0), 0)
  variance[nrow(variance), nrow(variance)] <- 1 / (2 * df.residual(m))
  delta(c(coef(m), log(sigma(m))), variance, function(v) {
    explained <- mean((x %*% v[1:ncol(x)] - mean(x %*% v[1:ncol(x)]))^2)
    c(R2 = explained / (explained + exp(2 * v[[length(v)]])))
  })
}
expected <- function(m) {
  x <- model.matrix(m)
  delta(fixef(m), as.matrix(vcov(m)), function(v) {
    sums <- rowsum(cbpp$size * plogis(x %*% v), cbpp$herd)
    setNames(c(sums), rownames(sums))
  })
}

found <- list(
  sigma = row_of(glmmTMB(distance ~ age * Sex + (1 | Subject), orthodont,
    dispformula = ~Sex, REML = TRUE
  ), tmb("sigma", factor = 0.5)),
  phi = row_of(glmmTMB(share ~ log_income, engel, beta_family(), dispformula = ~log_income),
    tmb("phi")),
  shape = row_of(glmmTMB(Days ~ Eth + Sex + Lrn, quine, nbinom2, dispformula = ~Sex), tmb()),
  zi = row_of(glmmTMB(y ~ food + offset(logBroodSize) + (1 | Nest), owls, poisson,
    ziformula = ~food
  ), tmb()),
  zi_negative_binomial = row_of(glmmTMB(y ~ food + offset(logBroodSize) + (1 | Nest), owls, nbinom2,
    ziformula = ~food
  ), tmb()),
  hurdle = row_of(glmmTMB(y ~ food + offset(logBroodSize) + (1 | Nest), owls, truncated_poisson,
    ziformula = ~food
  ), tmb(zeros = "hu")),
  truncated_poisson = row_of(
    glmmTMB(y ~ food + offset(logBroodSize) + (1 | Nest), calling_owls, truncated_poisson), tmb()
  ),
  truncated_negative_binomial = row_of(
    glmmTMB(Days ~ Eth + Sex + Lrn, absent, truncated_nbinom2), tmb()
  ),
  weibull = row_of(survreg(Surv(time, status) ~ age + sex + ecog, lung), log_hazards),
  survival = row_of(survreg(Surv(time, status) ~ age + sex + ecog, lung),
    survival_at(c(180, 365, 730))),
  restricted_mean = row_of(survreg(Surv(time, status) ~ age + sex + ecog, lung), restricted(730)),
  intervals = row_of(survreg(
    Surv(ifelse(last == 0, NA, last), ifelse(status == 1, upper, NA), type = "interval2") ~
      age + sex + ecog, lung, dist = "lognormal"
  ), location),
  cox = row_of(coxph(Surv(time, status) ~ age + sex + ecog + strata(inst), lung)),
  cox_entry = row_of(coxph(Surv(start, stop, event) ~ age + surgery + transplant + strata(client),
    heart)),
  kaplan_meier = row_of(survfit(Surv(visit, status) ~ inst, lung, conf.type = "log-log"),
    kaplan_meier),
  meta_fixed = row_of(rma(yi, vi, data = studies, method = "FE"), meta),
  meta_random = row_of(rma(yi ~ struct, vi, data = studies, method = "REML"), meta),
  weights = row_of(glm(y ~ Gender + Dept, binomial, admissions, weights = Freq)),
  hypothesis = row_of(glm(y ~ Gender + Dept, binomial, admissions, weights = Freq), difference),
  marginal = row_of(glm(y ~ Gender + Dept, binomial, admissions, weights = Freq), marginal),
  smooth = row_of(
    gam(accel ~ s(times, k = 20, bs = "bs", m = c(3, 2)), data = mcycle, method = "REML"), curve_of
  ),
  gp = row_of(with(mcycle, gaussian_process(times, accel)), process_curve),
  monotonic = row_of(glm(cbind(ncases, ncontrols) ~ factor(age) + factor(alc), binomial, esoph),
    only("factor\\(alc\\)")),
  beta_binomial = row_of(glmmTMB(cbind(incidence, size - incidence) ~ period, cbpp, betabinomial),
    tmb()),
  median = row_of(rq(foodexp ~ income, 0.5, engel), quantile_regression),
  quantile = row_of(rq(foodexp ~ income, 0.9, engel), quantile_regression),
  negative_binomial = row_of(glm.nb(Days ~ Eth + Sex + Lrn, quine)),
  poisson_identity = row_of(glm(breaks ~ wool + tension, poisson(identity), warpbreaks)),
  cumulative = row_of(clmm(factor(SURENESS) ~ PROD + DAY + (1 | RESP), data = soup), cumulative),
  cumulative_weights = row_of(clm(factor(sat) ~ Infl + Type + Cont, data = housing, weights = Freq),
    cumulative),
  sratio = row_of(glm(stop ~ threshold + Infl + Type + Cont, binomial, stops, weights = Freq),
    negative),
  acat = row_of(glm(Freq ~ Infl * Type * Cont + factor(sat) + sat:X, poisson, housing),
    only("^sat:X")),
  categorical = row_of(multinom(sat ~ Infl + Type + Cont, housing, weights = Freq, trace = FALSE),
    classes),
  student = row_of(gam(medv ~ lstat + rm, scat(min.df = 1), boston)),
  r_squared = row_of(lm(medv ~ lstat + rm, boston), r_squared),
  standardize = row_of(
    glmer(cbind(incidence, size - incidence) ~ period + (1 | herd), cbpp, binomial), expected
  )
)
packages <- c(
  "glmmTMB", "lme4", "MASS", "metafor", "mgcv", "nlme", "nnet", "ordinal", "quantreg", "survival"
)
versions <- lapply(setNames(nm = packages), function(p) as.character(packageVersion(p)))
found$versions <- c(list(R = as.character(getRversion())), versions)
text <- toJSON(found, auto_unbox = TRUE, digits = 8, pretty = 1)
write(text, "examples/regression/features_r.json")
