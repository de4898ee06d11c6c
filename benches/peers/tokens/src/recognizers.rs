//! Recognisers with which kvatlas and toktrie walk their tries. All use the same transition table.

use std::collections::HashMap;

use kvatlas_vocab::{State, TransitionTable};
use toktrie::recognizer::{FunctionalRecognizer, StackRecognizer};

/// Copy of a transition table's rows. A row has an entry for each of the 256 bytes. An entry is the index at which the
/// next state's row begins; 0 rejects the byte.
pub struct Rows {
    places: Vec<u32>,
    start: u32,
}

impl Rows {
    /// Copies those rows of `table` that can be reached from the state `start`.
    pub fn new(table: &TransitionTable, start: State) -> Self {
        let mut places = vec![0; 256];
        let mut numbers = HashMap::from([(start, 256)]);
        let mut states = vec![start];
        let mut done = 0;
        while let Some(state) = states.get(done).copied() {
            done += 1;
            for byte in 0..=u8::MAX {
                let place = table.next(state, byte).map_or(0, |next| {
                    let unused = (states.len() as u32 + 1) * 256;
                    let place = *numbers.entry(next).or_insert(unused);
                    if place == unused {
                        states.push(next);
                    }
                    place
                });
                places.push(place);
            }
        }
        Self { places, start: 256 }
    }

    /// Returns a recogniser that implements the traits of both kvatlas and toktrie.
    pub fn stack(&self) -> Stack<'_> {
        Stack {
            places: &self.places,
            states: [self.start; 1025],
            top: 0,
        }
    }

    /// Returns toktrie's own recogniser for tables, made for this table.
    pub fn adapter(&self) -> StackRecognizer<u32, Transitions<'_>> {
        StackRecognizer::from(Transitions {
            places: &self.places,
            start: self.start,
        })
    }
}

/// Recogniser with a stack of states. It checks no bounds, so that hardly anything but the walk is measured.
pub struct Stack<'a> {
    places: &'a [u32],
    states: [u32; 1025],
    top: usize,
}

impl Stack<'_> {
    #[inline(always)]
    fn push(&mut self, byte: u8) -> bool {
        // SAFETY: states are places of whole rows. A stack holds at most as many bytes as the longest token has, which is at most 1,024.
        let next = unsafe {
            let state = *self.states.get_unchecked(self.top);
            *self.places.get_unchecked(state as usize + usize::from(byte))
        };
        if next == 0 {
            return false;
        }
        self.top += 1;
        // SAFETY: as above.
        unsafe { *self.states.get_unchecked_mut(self.top) = next };
        true
    }
}

impl kvatlas_vocab::Recognizer for Stack<'_> {
    #[inline(always)]
    fn try_push_byte(&mut self, byte: u8) -> bool {
        self.push(byte)
    }

    #[inline(always)]
    fn pop_bytes(&mut self, count: usize) {
        self.top -= count;
    }
}

impl toktrie::Recognizer for Stack<'_> {
    #[inline(always)]
    fn try_push_byte(&mut self, byte: u8) -> bool {
        self.push(byte)
    }

    #[inline(always)]
    fn pop_bytes(&mut self, count: usize) {
        self.top -= count;
    }

    fn collapse(&mut self) {}

    fn trie_finished(&mut self) {}
}

/// Transitions of an automaton, in the form that toktrie's adapter takes.
pub struct Transitions<'a> {
    places: &'a [u32],
    start: u32,
}

impl FunctionalRecognizer<u32> for Transitions<'_> {
    fn initial(&self) -> u32 {
        self.start
    }

    #[inline(always)]
    fn try_append(&self, state: u32, byte: u8) -> Option<u32> {
        // SAFETY: states are places of whole rows.
        let next = unsafe { *self.places.get_unchecked(state as usize + usize::from(byte)) };
        (next != 0).then_some(next)
    }
}

/// Recogniser that counts the nodes that a walk visits.
pub struct Counting<R> {
    inner: R,
    pub visits: usize,
}

impl<R> Counting<R> {
    pub fn new(inner: R) -> Self {
        Self { inner, visits: 0 }
    }
}

impl<R: toktrie::Recognizer> toktrie::Recognizer for Counting<R> {
    fn try_push_byte(&mut self, byte: u8) -> bool {
        self.visits += 1;
        self.inner.try_push_byte(byte)
    }

    fn pop_bytes(&mut self, count: usize) {
        self.inner.pop_bytes(count);
    }

    fn collapse(&mut self) {}

    fn trie_finished(&mut self) {}
}
