//! Tests of the wire contract as a whole; small rules are tested beside their code.

mod forms;
mod fuzz;
mod generate;
mod human;
mod limits;
mod refused;
mod round_trip;
