//! Tests of the wire contract as a whole. Small rules have tests in the files of their code.

mod forms;
mod fuzz;
mod generate;
mod human;
mod limits;
mod refused;
mod round_trip;
