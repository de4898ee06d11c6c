//! Parts of the daemon without which its answers would be wrong in silence: the lanes, and the lasting tasks of its stages.
//!
//! If one of them panics, events are no longer applied, or silent holders no longer noticed, while queries would still be
//! answered as exact. So the whole process ends, and whoever supervises it starts it again, from its last snapshot.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use futures_util::FutureExt;

/// Runs a vital thread's work to its end.
pub(crate) fn run_vital(work: impl FnOnce()) {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(end_process);
}

/// Runs a vital task to its end.
pub(crate) async fn vital(work: impl Future<Output = ()>) {
    let ended = AssertUnwindSafe(work).catch_unwind().await;
    ended.unwrap_or_else(end_process);
}

/// Ends the process because of a panic. The panic itself has been told with its place.
fn end_process(_: Box<dyn Any + Send>) {
    tracing::error!(
        "a part of the daemon has panicked; the process ends, because its answers would be wrong"
    );
    std::process::abort();
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const CHILD: &str = "KVATLAS_TEST_VITAL";

    /// The test runs itself in other processes, in which a thread or a task panics.
    #[tokio::test]
    async fn a_panic_of_a_vital_part_ends_the_process() {
        match std::env::var(CHILD).as_deref() {
            Ok("thread") => return run_vital(|| panic!("on purpose")),
            Ok(_) => return vital(async { panic!("on purpose") }).await,
            Err(_) => {}
        }
        run_vital(|| {});
        vital(async {}).await;
        for part in ["thread", "task"] {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args([
                "--exact",
                "vital::tests::a_panic_of_a_vital_part_ends_the_process",
            ]);
            let ended = child.env(CHILD, part).output().unwrap();
            // A test that fails has a code.
            assert_eq!(ended.status.code(), None, "a signal ends it: {ended:?}");
        }
    }
}
