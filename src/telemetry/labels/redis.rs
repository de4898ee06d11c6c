//! Labels of the listener for llm-d's routers.

use super::LabelValue;

label_values! {
    /// Commands of routers of llm-d, by what they are about.
    RedisCommand: "command" {
        /// A look-up of a block.
        Hkeys => "hkeys",
        /// A speculative entry is written or taken back.
        Write => "write",
        /// One of llm-d's scripts.
        Script => "script",
        /// Which keys have speculative entries.
        Scan => "scan",
        /// The connection itself.
        Connection => "connection",
    }
}

label_values! {
    /// Why a command of a router of llm-d was refused.
    RedisRefusal: "reason" {
        /// A command that is not answered here.
        UnknownCommand => "unknown_command",
        /// A script that is not known here.
        UnknownScript => "unknown_script",
        /// Arguments that the command does not take.
        BadRequest => "bad_request",
        /// The client has not shown the password, or another one.
        Unauthenticated => "unauthenticated",
        /// Somebody writes what an engine has: engines are followed here.
        EngineEntry => "engine_entry",
        /// Bytes that are no command; the connection ends.
        Protocol => "protocol",
        /// A command that is too long, or all that have come take too much room; the connection ends.
        TooLarge => "too_large",
        /// Too many large answers of the namespace wait.
        Busy => "busy",
    }
}

label_values! {
    /// Why a speculative entry went before its router took it back.
    GuessDrop: "reason" {
        /// Its time to live had ended.
        Expired => "expired",
        /// There was no room for more.
        Room => "room",
    }
}
