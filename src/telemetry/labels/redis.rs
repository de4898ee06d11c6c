//! Labels of the listener for llm-d's routers.

use super::LabelValue;

label_values! {
    /// Commands that llm-d's routers send, by purpose.
    RedisCommand: "command" {
        /// A look-up of a block's holders.
        Hkeys => "hkeys",
        /// A router writes a speculative entry (its guess of where a block will be), or takes one back.
        Write => "write",
        /// Running one of llm-d's scripts.
        Script => "script",
        /// Listing the keys that have speculative entries (routers' guesses of where blocks will be).
        Scan => "scan",
        /// A command about the connection itself, such as its password.
        Connection => "connection",
    }
}

label_values! {
    /// Reason why a command from one of llm-d's routers was refused.
    RedisRefusal: "reason" {
        /// The command is not one that the listener answers.
        UnknownCommand => "unknown_command",
        /// The listener does not know the script.
        UnknownScript => "unknown_script",
        /// The arguments are not valid for the command.
        BadRequest => "bad_request",
        /// The client has not given the password, or has given a wrong one.
        Unauthenticated => "unauthenticated",
        /// The client writes an entry of an engine. The daemon follows engines itself and takes no such entries.
        EngineEntry => "engine_entry",
        /// The bytes are no command of the protocol; the connection ends.
        Protocol => "protocol",
        /// The command is too long, or all waiting commands together take too much room; the connection ends.
        TooLarge => "too_large",
    }
}

label_values! {
    /// Reason why a speculative entry (a router's guess of where a block will be) was dropped before its router took it back.
    GuessDrop: "reason" {
        /// The time to live of the speculative entry had ended.
        Expired => "expired",
        /// The oldest speculative entries were dropped to make room for newer ones.
        Room => "room",
    }
}
