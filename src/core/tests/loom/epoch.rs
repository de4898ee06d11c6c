//! Collector that replaces the product's collector, which loom does not know. It runs deferred work as soon as
//! possible: when all guards are gone that were held when the work was deferred. So the check finds a reader that uses
//! freed memory.

use loom::lazy_static;
use loom::sync::Mutex;

lazy_static! {
    static ref STATE: Mutex<State> = Mutex::default();
}

/// Deferred work, with the numbers of the guards that must be dropped before it runs.
struct PutOff {
    guards: Vec<usize>,
    free: Box<dyn FnOnce()>,
}

#[derive(Default)]
struct State {
    made: usize,
    held: Vec<usize>,
    put_off: Vec<PutOff>,
}

#[allow(unsafe_code, reason = "what the product frees may be freed on any thread")]
// SAFETY: callers of `Guard::defer` promise that the work may run on any thread.
unsafe impl Send for PutOff {}

/// Guard of a reader, identified by a number.
#[derive(Debug)]
pub(crate) struct Guard(usize);

pub(crate) fn pin() -> Guard {
    let mut state = STATE.lock().unwrap();
    state.made += 1;
    let number = state.made;
    state.held.push(number);
    Guard(number)
}

impl Guard {
    pub(crate) fn flush(&self) {}

    /// Runs `free` when all guards are gone that are held at the time of the call.
    ///
    /// # Safety
    ///
    /// The conditions are those of the same function of the product's guard.
    #[allow(unsafe_code, reason = "as the product's guard")]
    pub(crate) unsafe fn defer(&self, free: impl FnOnce() + 'static) {
        let mut state = STATE.lock().unwrap();
        let guards = state.held.clone();
        let free = Box::new(free);
        state.put_off.push(PutOff { guards, free });
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let due: Vec<PutOff> = {
            let mut state = STATE.lock().unwrap();
            state.held.retain(|held| *held != self.0);
            for put_off in &mut state.put_off {
                put_off.guards.retain(|guard| *guard != self.0);
            }
            state
                .put_off
                .extract_if(.., |put_off| put_off.guards.is_empty())
                .collect()
        };
        due.into_iter().for_each(|put_off| (put_off.free)());
    }
}
