//! Tests of the wire contract as a whole; small rules are tested beside their code.
