//! The kit catches what it claims to catch: each fault fails the check that is about it.

use std::sync::Arc;

use atoll_vfs::kit::{
    Report, Tree, Verdict, run_read_suite, run_restart_suite, run_shared_suite, run_write_suite,
};

use crate::broken::{BrokenSubject, Fault};
use crate::reference::filled;

/// That of all checks at least `expected` failed.
fn assert_caught(report: &Report, expected: &str) {
    let caught = report.failures().any(|(name, _)| name == expected);
    assert!(caught, "{expected} should have failed\n{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_read_suite_catches_every_fault() {
    let faults = [
        (Fault::LosesTheLastByte, "every_file_reads_as_it_was_written"),
        (Fault::FailsPastTheEnd, "a_read_at_the_end_is_short_and_after_it_empty"),
        (Fault::ShortReads, "every_file_reads_as_it_was_written"),
        (Fault::MixesUpParallelReads, "one_handle_serves_many_readers"),
        (Fault::WrongLinkCount, "lookup_getattr_and_listing_agree"),
        (Fault::UnstableNumbers, "one_file_has_one_number"),
        (Fault::SkipsAtPageBoundaries, "a_listing_is_the_same_with_every_limit"),
        (Fault::RepeatsAtPageBoundaries, "a_big_directory_is_listed_in_pages"),
        (Fault::IgnoresTheLimit, "every_listing_is_complete"),
        (Fault::ListsDots, "every_listing_is_complete"),
        (Fault::HugeCookies, "cookies_are_sound"),
        (Fault::ListsWrongKinds, "lookup_getattr_and_listing_agree"),
        (Fault::OmitsEntries, "lookup_getattr_and_listing_agree"),
        (Fault::MissingIsEio, "a_missing_name_is_enoent"),
        (Fault::AcceptsLongNames, "a_name_of_256_bytes_is_too_long"),
        (Fault::AcceptsAnyNumber, "an_unknown_number_is_refused"),
        (Fault::TimesWithoutNanoseconds, "sizes_modes_and_times_are_kept"),
        (Fault::DropsSetIdBits, "sizes_modes_and_times_are_kept"),
        (Fault::CutsXattrs, "extended_attributes_are_kept"),
        (Fault::AllowsWrites, "changes_of_names_are_erofs"),
        (Fault::OpensForWriting, "opening_for_writing_is_erofs"),
        (Fault::SaysEverythingIsAHole, "holes_and_data_are_found"),
        (Fault::TellsOfOneName, "the_figures_of_the_file_system_are_sound"),
        (Fault::Panics, "every_name_is_found"),
    ];
    let base = filled(&Tree::fixture(), true).await;
    let run =
        async |fault| run_read_suite(&BrokenSubject { fault, base: Some(base.clone()) }).await;
    run(Fault::Nothing).await.assert_passes();
    for (fault, expected) in faults {
        assert_caught(&run(fault).await, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn the_write_suite_catches_every_fault() {
    let faults = [
        (Fault::IgnoresExclusive, "an_exclusive_create_makes_a_file_once"),
        (Fault::IgnoresExclusive, "creators_at_once_make_one_file"),
        (Fault::TellsOfShorterFiles, "a_write_beyond_the_largest_file_is_efbig"),
        (Fault::KeepsHalfAVerifier, "an_exclusive_creation_is_known_again_by_its_verifier"),
        (Fault::TakesAnyVerifier, "an_exclusive_creation_is_known_again_by_its_verifier"),
        (Fault::ForgetsVerifiers, "an_exclusive_creation_is_known_again_by_its_verifier"),
        (Fault::AppendsAtTheOffset, "appends_go_to_the_end"),
        (Fault::AppendsMappedPages, "pages_of_a_mapping_go_where_they_lie"),
        (Fault::KeepsBytesCutOff, "a_file_that_shrank_and_grew_shows_zeros"),
        (Fault::IgnoresNoReplace, "no_replace_refuses_what_exists"),
        (Fault::RemovesFullDirectories, "rmdir_refuses_files_and_full_directories"),
        (Fault::ListsLive, "a_listing_is_one_snapshot"),
        (Fault::ListsLive, "a_listing_goes_on_in_another_open"),
        (Fault::LosesSetTimes, "times_are_set_to_the_nanosecond"),
        (Fault::IgnoresTruncate, "opening_with_truncate_empties"),
        (Fault::WrongLinkCount, "a_new_file_has_one_link"),
        (Fault::LosesTheLastByte, "what_is_written_is_read_back"),
        (Fault::FindsDeletedFilesByHandle, "a_handle_of_a_deleted_file_is_stale"),
        (Fault::LocksExcludeNobody, "an_exclusive_lock_keeps_others_from_its_bytes"),
        (Fault::LocksAreAllExclusive, "shared_locks_exclude_exclusive_ones_alone"),
        (Fault::UnlocksWholeLocks, "unlocking_the_middle_leaves_both_ends"),
        (Fault::RefusedUpgradesUnlock, "a_lock_is_upgraded_and_downgraded_in_place"),
        (Fault::WaitsForNoLock, "a_waiting_lock_is_taken_when_the_other_goes"),
        (
            Fault::ProcessesKeepThemselvesOut,
            "a_process_does_not_keep_itself_out_by_the_other_kind_of_lock",
        ),
        (Fault::TakesLocksAfterInterrupts, "an_interrupted_wait_leaves_no_lock"),
        (Fault::KeepsBytesPunched, "a_punched_hole_shows_zeros_and_takes_no_space"),
        (Fault::LengthensWhatItPunches, "a_punched_hole_shows_zeros_and_takes_no_space"),
    ];
    run_write_suite(&BrokenSubject { fault: Fault::Nothing, base: None }).await.assert_passes();
    for (fault, expected) in faults {
        let report = run_write_suite(&BrokenSubject { fault, base: None }).await;
        assert_caught(&report, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn the_shared_suite_catches_every_fault() {
    let faults = [
        (Fault::TellsOfNoBytes, "a_write_is_told_with_its_bytes"),
        (Fault::TellsOfNoDeletion, "a_deleted_file_is_told_by_its_name"),
        (Fault::TellsItself, "a_views_own_changes_are_not_told_to_it"),
        (Fault::LocksExcludeNobody, "a_lock_of_one_view_keeps_the_other_out"),
    ];
    run_shared_suite(&BrokenSubject { fault: Fault::Nothing, base: None }).await.assert_passes();
    for (fault, expected) in faults {
        let report = run_shared_suite(&BrokenSubject { fault, base: None }).await;
        assert_caught(&report, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn the_restart_suite_catches_every_fault() {
    let faults = [
        (Fault::FindsNothingByHandle, "handles_lead_to_their_files_after_restarts"),
        (Fault::FindsNothingByHandle, "a_handle_lasts_as_long_as_a_file_has_names"),
        (Fault::UnstableNumbers, "numbers_are_the_same_after_restarts"),
        (Fault::FindsDeletedFilesByHandle, "handles_of_removed_files_are_stale_after_restarts"),
        (Fault::FindsByName, "handles_of_replaced_files_are_stale_after_restarts"),
        (Fault::FindsByName, "a_new_file_under_a_removed_name_has_another_handle"),
        (Fault::FindsByName, "handles_follow_renames_over_restarts"),
        (Fault::FindsByName, "handles_follow_exchanged_names_over_restarts"),
    ];
    let report = run_restart_suite(&BrokenSubject { fault: Fault::Nothing, base: None }).await;
    report.assert_passes();
    assert_eq!(report.passed(), report.checks.len(), "nothing is skipped\n{report}");
    for (fault, expected) in faults {
        let report = run_restart_suite(&BrokenSubject { fault, base: None }).await;
        assert_caught(&report, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_system_that_does_not_answer_fails_the_check_and_not_the_run() {
    let base = filled(&Tree::fixture(), true).await;
    let report = run_read_suite(&BrokenSubject { fault: Fault::Hangs, base: Some(base) }).await;
    assert_caught(&report, "every_name_is_found");
    let root = report.checks.iter().find(|check| check.name == "the_root_is_a_directory");
    assert_eq!(root.map(|check| &check.verdict), Some(&Verdict::Passed));
    let (_, reason) = report.failures().next().expect("it hangs");
    assert!(reason.contains("no answer"), "{reason}");
}

#[tokio::test]
#[should_panic(expected = "FAILED every_name_is_found")]
async fn a_report_with_failures_does_not_pass() {
    let base = Arc::clone(&filled(&Tree::fixture(), true).await);
    let subject = BrokenSubject { fault: Fault::Panics, base: Some(base) };
    run_read_suite(&subject).await.assert_passes();
}
