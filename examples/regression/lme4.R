# Fit the cases by maximum likelihood with lme4, glmmTMB, ordinal and survival, and write lme4.json.
#
# Simulated tables are also read from the folder, where `simulated.py FOLDER` writes them.
#
# Run: Rscript examples/regression/lme4.R FOLDER_OF_CSV_FILES
suppressMessages({
  library(lme4)
  library(ordinal)
  library(survival)
  library(glmmTMB)
  library(jsonlite)
})
folder <- commandArgs(trailingOnly = TRUE)[1]
table_of <- function(name) read.csv(file.path(folder, paste0(name, ".csv")))

epil <- transform(table_of("epil"), log_base = log(base / 4), log_age = log(age))
used <- c("sick", "age", "sex", "cp", "exang", "oldpeak", "hospital")
heart <- na.omit(transform(table_of("heart_disease"), sick = as.integer(target > 0))[used])
penguins <- subset(table_of("penguins"), !is.na(bill_length_mm) & !is.na(sex) & sex != "")
penguins <- transform(penguins, shape = bill_depth_mm / bill_length_mm)
sleep <- table_of("sleepstudy")
nurses <- table_of("nurses")
seizures <- seizures ~ log_base * treatment + log_age + visit4 + (1 | subject)

# Estimates, standard errors, and standard deviations of groups and residuals, in lme4's order.
fixed <- function(s, error = 2) {
  list(estimate = as.list(s[, 1]), se = as.list(s[, error]))
}
# A fit is evaluated where it is first used, which gives its CPU seconds.
seconds_of <- function(m) round(system.time(force(m))[["user.self"]], 2)
mixed <- function(m) {
  seconds <- seconds_of(m)
  sd <- as.data.frame(VarCorr(m))$sdcor
  c(fixed(coef(summary(m))), list(sd = sd, seconds = seconds))
}
tmb <- function(m) {
  seconds <- seconds_of(m)
  groups <- unlist(lapply(VarCorr(m)$cond, diag))
  c(fixed(summary(m)$coefficients$cond), list(sd = unname(sqrt(groups)), seconds = seconds))
}
cumulative <- function(m) {
  seconds <- seconds_of(m)
  c(fixed(coef(summary(m))), list(sd = sqrt(VarCorr(m)[[1]][1]), seconds = seconds))
}

# Logistic regression of simulated rows, by all columns but those of groups.
linear <- function(name) {
  rows <- table_of(name)
  covariates <- setdiff(names(rows), c("client", "y"))
  mixed(glmer(reformulate(c(covariates, "(1 | client)"), "y"), rows, binomial))
}
rated <- y ~ 1 + (1 | item) + (1 | rater) + (1 | client)

nes <- partyid7 ~ real_ideo + race_adj + factor(age_discrete) + educ1 + gender + income + (1 | year)
stress <- stress ~ age + gender + experien + factor(wardtype) + factor(hospsize) + (1 | hospital)
found <- list(
  sleepstudy = mixed(lmer(Reaction ~ Days + (Days | Subject), sleep)),
  radon = mixed(lmer(log_radon ~ floor + log_uranium + (1 | county), table_of("radon_minnesota"))),
  rats = mixed(lmer(weight ~ day + (day | rat), table_of("rats_growth"))),
  penguins = mixed(lmer(body_mass_g ~ flipper_length_mm + sex + (1 | island), penguins)),
  nurses = mixed(lmer(stress, nurses)),
  nes = mixed(lmer(nes, table_of("nes_1972_2000"))),
  heart_disease = mixed(glmer(
    sick ~ age + sex + factor(cp) + exang + oldpeak + (1 | hospital), heart, binomial
  )),
  trauma = mixed(glmer(
    mortality ~ sex + age + ISS + GCS + (1 | hospital), table_of("trauma"), binomial
  )),
  cbpp = mixed(glmer(
    cbind(incidence, size - incidence) ~ factor(period) + (1 | herd), table_of("cbpp"), binomial
  )),
  seeds = mixed(glmer(
    cbind(germinated, seeds - germinated) ~ extract * type + (1 | plate), table_of("seeds"), binomial
  )),
  surgical = mixed(glmer(
    cbind(deaths, operations - deaths) ~ 1 + (1 | hospital), table_of("surgical"), binomial
  )),
  rat_tumors = mixed(glmer(
    cbind(tumors, rats - tumors) ~ 1 + (1 | experiment), table_of("rat_tumors"), binomial
  )),
  baseball = mixed(glmer(
    cbind(hits, at_bats - hits) ~ 1 + (1 | player), table_of("baseball_1970"), binomial
  )),
  epil = mixed(glmer(seizures, epil, poisson)),
  epil_negative_binomial = mixed(glmer.nb(seizures, epil)),
  epil_zero_inflated = tmb(glmmTMB(seizures, epil, ziformula = ~1, family = poisson)),
  sleepstudy_gamma = tmb(glmmTMB(Reaction ~ Days + (1 | Subject), sleep, Gamma("log"))),
  sleepstudy_lognormal = mixed(lmer(log(Reaction) ~ Days + (Days | Subject), sleep)),
  penguins_beta = tmb(glmmTMB(shape ~ species + sex + (1 | island), penguins, beta_family())),
  nurses_cumulative = cumulative(clmm(update(stress, factor(.) ~ .), nurses)),
  hospitals_160 = linear("hospitals_160"),
  hospitals_929 = linear("hospitals_929"),
  admissions = linear("admissions"),
  ratings = mixed(glmer(rated, table_of("ratings"), binomial)),
  thirty_items = mixed(glmer(rated, table_of("thirty_items"), binomial)),
  coefficients_60 = linear("coefficients_60"),
  clients_5000 = linear("clients_5000"),
  uneven = linear("uneven"),
  kidney_cox = fixed(
    coef(summary(coxph(Surv(time, status) ~ age + sex + strata(disease), table_of("kidney")))), 3
  )
)
packages <- c("lme4", "glmmTMB", "ordinal", "survival")
versions <- lapply(setNames(nm = packages), function(p) as.character(packageVersion(p)))
found$versions <- c(list(R = as.character(getRversion())), versions)
write(toJSON(found, auto_unbox = TRUE, digits = 6, pretty = 1), "examples/regression/lme4.json")
