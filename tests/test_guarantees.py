"""Each row of the page of guarantees names its tests."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "examples/docs/guarantees.md").read_text()
SECTIONS = PAGE.partition("## Limits")[0]
ROW = re.compile(r"^ *(?:- |\| )(.+)$", re.MULTILINE)
HEADS = ("| model |", "|---")

# The beginning of a row -> functions of tests.
NAMED = {
    "The ELBO of every client": "loss_is_trace_elbo analytic_loss_is_trace_mean_field_elbo",
    "Training clients together": "side_by_side_is_one_after_the_other",
    "In conjugate models, pFedVEM's": "three_rounds_follow_the_closed_form "
    "no_step_of_em_lowers_the_bound_and_the_e_step_makes_it_the_evidence",
    "linear mixed model with learned": "the_server_has_the_density_of_the_pooled_rows",
    "linear mixed model whose variances are all": "known_variances_give_the_normal_posterior_of_"
    "the_pooled_rows one_round_of_pvi_is_the_normal_posterior_of_the_pooled_rows",
    "shared probabilities and rates": "one_round_is_the_exact_posterior",
    "linear regression with known variance": "one_round_is_the_exact_posterior",
    "hierarchical program in which rows": "the_posterior_is_exact_but_for_the_error_of_draws",
    "Draws of likelihood factors come": "the_sampler_has_the_moments_of_a_heavy_tail",
    "`two_stage` (Lunn et al., 2013) sends": "means_of_the_clients_draws_are_marginal_likelihoods",
    "`fisher` with `local_prior`": "strata_are_those_of_bayesian_federated_inference",
    "Until every client has reported": "absent_clients_are_reported an_absent_client_is_not_in_the_"
    "density a_fit_has_not_converged_while_clients_are_missing",
    "The same seed gives": "equal_seeds_give_equal_bits a_fit_goes_on_from_a_round_bitwise",
    "The chunk size (how many": "chunks_order_threads_and_pauses_only_round threads_only_round",
    "The random numbers of a client": "a_client_is_the_same_whoever_else_is_there "
    "noise_depends_on_both_seeds_the_round_and_the_client",
    "`--seed` sets all seeds": "one_seed_for_all_is_the_same_seed_for_each",
    "An update that consists": "the_bits_are_those_of_steps_as_written "
    "code_of_a_user_is_recognized_wherever_it_is "
    "what_changes_between_rounds_takes_effect_in_what_is_promised",
    "A client is excluded from": "a_bad_message_is_named_and_left_out",
    "If clients disagree": "most_clients_decide_what_the_first_message_looks_like",
    "An excluded client keeps": "a_bad_message_is_named_and_left_out "
    "without_a_good_message_the_server_keeps_its_state_and_says_so "
    "a_bad_message_ends_the_run_if_that_is_asked",
    "These checks do not bound": "bad_messages_that_stay_within_the_norm_move_the_mean_by_no_more_"
    "than_it",
    "A client refuses requests": "another_seed_other_data_and_another_version_are_refused "
    "an_order_of_other_versions_or_another_method_is_refused_by_name "
    "a_client_does_not_answer_more_rounds_than_it_agreed_to",
    "If a prediction is NaN": "a_prediction_that_is_no_number_is_named",
    "The state of a client that drops": "who_is_not_heard_has_trained_and_the_rest_is_exact",
    "Everything that a remote client": "a_bad_reply_is_named_and_left_out "
    "a_machine_answers_for_its_own_clients_alone "
    "what_a_server_is_told_is_checked "
    "a_hostile_training_reply_is_named_and_left_out "
    "precisions_of_no_factor_are_named_and_left_out "
    "sums_of_no_rows_are_named_and_left_out "
    "numbers_of_no_rows_are_named_and_left_out "
    "hostile_scores_are_named_and_left_out "
    "hostile_likelihoods_are_named_and_nothing_is_corrected "
    "a_hostile_introduction_is_refused",
    "With `--checkpoint-every N`": "a_kill_in_training_loses_nothing "
    "a_kill_inside_a_write_leaves_the_old_file",
    "A resumed run can have more": "a_run_is_resumed_with_other_rounds_and_says_if_there_is_none "
    "rounds_of_a_schedule_are_among_what_must_be_the_same",
    "Loading a checkpoint": "no_code_in_a_file_is_run a_damaged_file_is_refused_or_read",
    "A checkpoint contains no": "sites_with_other_frozen_weights_or_helpers_have_other_methods "
    "another_method_is_refused_by_what_differs",
    "`report`, `benefit`, `conformal`": "altered_facts_are_refused an_altered_table_is_refused "
    "a_file_that_was_cut_off_is_refused",
    "Locks, logs and results": "logs_follow_no_links_and_wait_for_no_pipe "
    "files_with_values_of_rows_are_of_their_owner_alone",
    "`fit(resume_from=run)`": "a_fit_that_stopped_goes_on_as_if_it_had_not "
    "a_state_of_single_clients_is_refused_for_others",
    "Every run has a status": "a_fit_says_it_in_the_end",
    "*converged*": "small_steps_of_three_merges_and_more_have_converged",
    "*not converged*": "the_reason_is_the_change_in_the_last_round",
    "*stuck*": "a_run_that_learns_nothing_is_stuck_and_says_so_after_round_one",
    "*diverged*": "a_loss_that_rose_by_its_size_and_all_its_gains_has_diverged",
    "A diverged run has": "a_run_that_diverged_has_no_posterior_but_for_a_look "
    "a_replication_that_diverged_is_told_unless_asked_for",
    "Exit codes": "exit_codes_are_those_of_the_commands a_traceback_is_shown_if_it_is_asked_for",
}


@cache
def functions() -> set[str]:
    """Return the names of all functions of tests."""
    files = (f for f in TESTS.rglob("test_*.py") if f != Path(__file__))
    return {name for f in files for name in re.findall(r"^def test_(\w+)", f.read_text(), re.M)}


def rows() -> list[str]:
    """Return the rows of the page, with the mark of a cell's end."""
    lines = [m for m in ROW.finditer(SECTIONS) if not m[0].startswith(HEADS)]
    return [m[1] for m in lines]


def test_each_row_names_its_tests():
    found = {row: [begin for begin in NAMED if row.startswith(begin)] for row in rows()}
    assert {row: begins for row, begins in found.items() if len(begins) != 1} == {}
    assert {begin for begins in found.values() for begin in begins} == {*NAMED}


@pytest.mark.parametrize("begin", NAMED)
def test_named_tests_exist(begin):
    assert {*NAMED[begin].split()} - functions() == set()
