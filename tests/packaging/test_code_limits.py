"""Limits of the source: length of test names and of product files, no upper bounds of wall-clock time in tests.

Each table lists what exceeded a limit when the check was added. Remove entries, never add one.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from support.jobs import REPOSITORY

LONGEST_TEST_NAME = 60
MOST_LINES = 500
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}

LONG_TEST_NAMES: frozenset[str] = frozenset(
    {
        "test_a_client_that_is_killed_leaves_no_object_and_the_next_submit_uploads",
        "test_a_cluster_is_kept_after_failures_of_the_job_not_of_its_own",
        "test_a_cost_limit_never_shortens_a_runtime_that_was_asked_for",
        "test_a_cut_run_goes_on_with_the_same_batches_and_augmentations",
        "test_a_damaged_checkpoint_is_named_and_the_one_before_is_used",
        "test_a_deny_counts_more_than_any_allow_in_any_order_and_policy",
        "test_a_deterministic_pipeline_is_cut_alike_whatever_was_measured",
        "test_a_difference_stops_a_real_estimator_before_anything_is_sent",
        "test_a_first_job_may_be_created_with_the_outputs_of_every_root",
        "test_a_follower_of_a_run_that_is_stopped_in_the_queue_ends_with_5",
        "test_a_job_with_preferences_may_take_the_pool_of_each_of_them",
        "test_a_job_without_keep_alive_takes_the_cluster_and_does_not_keep_it",
        "test_a_named_place_counts_before_what_lies_where_the_run_will_save",
        "test_a_negation_in_cloudtrainignore_wins_over_everything_but_history_and_runs",
        "test_a_new_run_that_is_refused_does_not_hide_the_one_that_goes_on",
        "test_a_notice_in_the_middle_of_a_profile_keeps_what_was_recorded",
        "test_a_notice_reaches_the_workers_and_their_children_and_gives_them_time",
        "test_a_notice_while_workers_are_being_started_reaches_all_of_them",
        "test_a_plan_is_refused_exactly_when_its_request_breaks_a_limit",
        "test_a_rank_that_fails_does_not_take_the_save_under_way_with_it",
        "test_a_refresh_leaves_other_regions_alone_and_beats_what_came_with_cloudtrain",
        "test_a_restart_forks_again_and_the_others_are_ended_with_their_children",
        "test_a_resumed_pipeline_is_bit_identical_and_keeps_its_stages",
        "test_a_run_that_aws_batch_has_forgotten_is_found_by_sagemakers_search",
        "test_a_run_that_cannot_see_its_checkpoints_does_not_begin_anew",
        "test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew",
        "test_a_script_does_not_silently_save_elsewhere_than_it_was_told",
        "test_a_script_of_the_plain_estimator_that_fails_says_so_as_awss_toolkit_does",
        "test_a_script_reads_the_resumed_runs_checkpoints_and_saves_to_its_own",
        "test_a_script_that_ignores_the_notice_is_ended_when_the_grace_is_over",
        "test_a_secret_that_cannot_be_had_is_told_before_anything_starts",
        "test_a_secret_that_is_not_there_fails_the_run_before_its_ranks",
        "test_a_secret_that_is_not_there_fails_with_the_command_that_makes_it",
        "test_a_stream_keeps_back_no_more_than_the_beginning_of_a_value",
        "test_a_stream_makes_the_same_steps_however_the_model_is_spread",
        "test_a_tail_gets_each_line_once_while_hosts_write_and_everything_breaks",
        "test_a_wrong_value_hides_no_rule_elsewhere_and_starts_no_false_alarm",
        "test_all_ranks_see_a_flag_at_the_same_boundary_however_fast_each_is",
        "test_an_earlier_runs_archive_of_which_s3_does_not_tell_is_left",
        "test_an_instance_that_dies_is_an_internal_error_and_retried_on_request",
        "test_an_instance_type_that_is_newer_than_the_catalog_is_a_warning",
        "test_an_instance_type_that_neither_we_nor_the_aws_model_know_is_refused",
        "test_another_number_of_lanes_or_shuffle_waits_for_the_next_epoch",
        "test_another_number_of_ranks_makes_the_same_steps_from_the_same_samples",
        "test_calls_of_other_processes_are_recorded_and_those_of_tests_are_not",
        "test_counts_strike_the_next_calls_and_probabilities_repeat_with_the_seed",
        "test_cut_anywhere_and_resumed_with_any_number_of_ranks_the_steps_are_the_same",
        "test_every_example_value_and_default_in_it_fits_its_own_field",
        "test_first_in_first_out_and_a_large_one_holds_up_those_behind",
        "test_hosts_with_files_of_their_own_share_them_among_their_ranks",
        "test_hyperparameters_of_an_estimator_become_arguments_as_they_are",
        "test_interrupted_spot_instances_come_back_with_the_checkpoints",
        "test_locally_torchrun_stands_in_for_mpirun_and_the_plan_says_so",
        "test_malformed_settings_are_refused_and_say_where_they_come_from",
        "test_missed_checkpoints_are_an_alarm_from_the_moment_that_says_so",
        "test_mpiruns_variables_are_read_and_the_master_is_the_first_host",
        "test_no_place_prefers_a_sample_and_orders_know_nothing_of_each_other",
        "test_nothing_is_deleted_for_a_checkpoint_that_cannot_be_read_back",
        "test_on_a_gpu_one_step_is_measured_and_read_when_the_device_has_passed_it",
        "test_our_bucket_is_asked_for_with_its_owner_and_the_users_is_not",
        "test_patience_counts_each_evaluation_once_however_often_a_run_is_killed",
        "test_ranks_of_a_script_that_starts_its_own_are_not_doubled_in_silence",
        "test_ranks_that_run_out_keep_step_and_each_sample_is_used_once",
        "test_retries_start_the_workers_again_from_the_last_checkpoint",
        "test_roles_and_buckets_that_fit_come_first_and_others_say_why",
        "test_spot_is_bounded_by_the_on_demand_price_of_all_its_waiting",
        "test_steps_without_a_finite_gradient_are_left_out_then_the_run_ends",
        "test_submit_policy_knows_the_types_with_local_disks_as_cloudtrain_does",
        "test_submit_with_settings_but_without_credentials_is_the_clouds_refusal",
        "test_submit_without_an_account_says_what_is_missing_and_names_local",
        "test_the_estimators_document_is_the_plans_and_nothing_is_sent",
        "test_the_kept_limits_are_those_of_the_model_and_a_broken_copy_is_made_anew",
        "test_the_last_lines_are_printed_where_nobody_reads_line_by_line",
        "test_the_launcher_compiles_the_runtime_while_torch_is_imported",
        "test_the_newest_container_whose_pytorch_has_kernels_for_the_gpu",
        "test_the_next_preference_is_taken_where_the_first_has_no_capacity",
        "test_the_norm_counts_a_gradient_once_of_which_ranks_hold_summands",
        "test_the_one_that_failed_first_is_named_though_another_failed_within_the_same_look",
        "test_the_toolkit_starts_an_estimators_script_with_its_hyperparameters",
        "test_tokens_in_text_refuse_with_their_line_and_are_never_shown",
        "test_too_many_in_a_row_end_the_run_with_the_batch_of_the_last",
        "test_two_writers_of_the_same_step_do_not_touch_each_others_files",
        "test_until_a_lane_ends_any_number_of_ranks_makes_the_same_steps",
        "test_utilisation_is_what_the_samples_needed_of_what_the_devices_could",
        "test_variables_are_filled_in_and_match_nothing_where_the_request_has_none",
        "test_what_an_earlier_version_has_written_of_plain_values_is_loaded",
        "test_what_could_be_saved_and_not_loaded_is_refused_before_the_first_step",
        "test_what_is_no_training_is_left_out_of_the_step_that_it_lies_in",
        "test_what_is_saved_is_the_state_at_that_step_and_the_run_goes_on_from_it_to_the_last_bit",
        "test_what_only_some_versions_of_torch_read_is_refused_by_the_others",
        "test_what_the_import_prints_is_dropped_and_what_others_print_is_not",
        "test_without_capacity_of_any_type_a_job_waits_and_nothing_is_selected",
    }
)
LONG_FILES = frozenset(
    {
        "cloudtrain/backends/sagemaker/backend.py",
        "cloudtrain/backends/sagemaker/logs.py",
        "cloudtrain/bundle/contents.py",
        "cloudtrain/failure_rules/rules.py",
        "cloudtrain_runtime/checkpoint/saving.py",
        "cloudtrain_runtime/checkpoint/script_api.py",
    }
)
TIMED_TESTS: frozenset[str] = frozenset(
    {
        "test_a_job_that_ended_long_ago_is_not_waited_for",
        "test_a_rank_that_is_gone_is_not_waited_for",
        "test_a_stale_index_costs_little",
        "test_a_storage_that_never_answers_is_told_and_holds_nobody",
        "test_an_upload_ends_in_one_sentence",
        "test_output_ends_though_a_process_of_the_ranks_lives_on",
        "test_stop_saves_and_ends_every_process",
        "test_ten_thousand_files_of_data_cost_little",
        "test_what_never_answered_is_an_error_at_once",
    }
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_in(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


@functools.cache
def all_tests() -> tuple[Function, ...]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (REPOSITORY / "tests").rglob("test_*.py")]
    return tuple(each for tree in trees for each in functions_in(tree) if each.name.startswith("test_"))


def is_elapsed_time(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression contains a difference of clock readings, or a variable that holds one."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in names:
            return True
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and is_clock_reading(part.left):
            return True
    return False


def is_clock_reading(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "time"
        and node.func.attr in CLOCKS
    )


def elapsed_names(function: Function) -> set[str]:
    """Return the variables of a function to which a difference of clock readings is assigned or appended."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and is_elapsed_time(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            owner = node.func.value
            if isinstance(owner, ast.Name) and any(is_elapsed_time(each, names) for each in node.args):
                names.add(owner.id)
    return names


def has_upper_time_bound(function: Function) -> bool:
    names = elapsed_names(function)
    for check in (node for node in ast.walk(function) if isinstance(node, ast.Assert)):
        for node in ast.walk(check):
            if isinstance(node, ast.Compare):
                values = [node.left, *node.comparators]
                for operator, left, right in zip(node.ops, values[:-1], values[1:], strict=True):
                    smaller = left if isinstance(operator, ast.Lt | ast.LtE) else right
                    if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and is_elapsed_time(smaller, names):
                        return True
    return False


def parse_function(text: str) -> Function:
    return next(functions_in(ast.parse(text)))


def test_names_of_tests_have_at_most_60_characters() -> None:
    found = {function.name for function in all_tests() if len(function.name) > LONGEST_TEST_NAME}
    assert sorted(found - LONG_TEST_NAMES) == []


def test_product_files_have_at_most_500_lines() -> None:
    found = set[str]()
    for folder in (REPOSITORY / "sdk", REPOSITORY / "entrypoints"):
        for path in folder.rglob("*.py"):
            if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES:
                found.add(Path(path).relative_to(folder).as_posix())
    assert sorted(found - LONG_FILES) == []


def test_no_test_has_an_upper_bound_of_wall_clock_time() -> None:
    found = {function.name for function in all_tests() if has_upper_time_bound(function)}
    assert sorted(found - TIMED_TESTS) == []


def test_upper_time_bounds_are_detected() -> None:
    assert has_upper_time_bound(parse_function("def f():\n assert time.monotonic() - began < 4"))
    assert has_upper_time_bound(parse_function("def f():\n assert 4 >= time.time() - began"))
    assert has_upper_time_bound(parse_function("def f():\n took = time.monotonic() - began\n assert took < 4"))
    assert has_upper_time_bound(parse_function("def f():\n all.append(time.time() - a)\n assert min(all) < 4"))


def test_other_uses_of_a_clock_are_allowed() -> None:
    assert not has_upper_time_bound(parse_function("def f():\n assert time.monotonic() - began > 4"))
    assert not has_upper_time_bound(parse_function("def f():\n assert time.monotonic() < deadline"))
    assert not has_upper_time_bound(parse_function("def f():\n now = time.time() - 60\n send(now)"))
