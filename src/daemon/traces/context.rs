//! The `traceparent` header, which makes a request part of a trace.

/// Name of the header that makes a request part of a trace. It is the same in NATS and in HTTP.
pub(crate) const TRACEPARENT: &str = "traceparent";

/// Trace to which a request belongs, and the span that sent the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TraceContext {
    pub(super) trace_id: u128,
    pub(super) parent_id: u64,
}

impl TraceContext {
    /// Reads a `traceparent` header. `None` if its sampled flag is not set, or if it is not a valid `traceparent`.
    pub(crate) fn sampled(header: &str) -> Option<Self> {
        let mut parts = header.split('-');
        let version = hexadecimal(parts.next()?, 2)?;
        let trace_id = hexadecimal(parts.next()?, 32)?;
        let parent_id = u64::try_from(hexadecimal(parts.next()?, 16)?).ok()?;
        let flags = hexadecimal(parts.next()?, 2)?;
        // Version 0 has exactly these four parts. Later versions may have further parts, and 255 is not a version.
        let is_known = version != 255 && (version > 0 || parts.next().is_none());
        let is_sampled = flags & 1 == 1;
        let is_sound = is_known && is_sampled && trace_id != 0 && parent_id != 0;
        is_sound.then_some(Self { trace_id, parent_id })
    }

    /// Returns the `traceparent` header for requests that the span `span_id` of this trace sends.
    pub(super) fn below(&self, span_id: u64) -> String {
        format!("00-{:032x}-{span_id:016x}-01", self.trace_id)
    }
}

/// Reads a number of exactly `digits` hexadecimal digits in lower case.
fn hexadecimal(text: &str, digits: usize) -> Option<u128> {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let is_sound = text.len() == digits && text.bytes().all(is_digit);
    is_sound.then(|| u128::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_sampled_header_is_read() {
        let context = TraceContext::sampled(SAMPLED).unwrap();
        assert_eq!(context.trace_id, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!(context.parent_id, 0x00f0_67aa_0ba9_02b7);
        assert_eq!(
            TraceContext::sampled(&SAMPLED.replace("-01", "-03")),
            Some(context)
        );
        // A later version may have further parts.
        let later = format!("{}-more", SAMPLED.replacen("00", "cc", 1));
        assert_eq!(TraceContext::sampled(&later), Some(context));
    }

    #[test]
    fn others_are_not() {
        for header in [
            "",
            "00",
            &SAMPLED.replace("-01", "-00"),
            &SAMPLED.replace("-01", ""),
            &SAMPLED.replacen("00", "ff", 1),
            &format!("{SAMPLED}-more"),
            &SAMPLED.to_uppercase(),
            &SAMPLED.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &SAMPLED.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &SAMPLED.replace("00f067aa0ba902b7", "+0f067aa0ba902b7"),
            &SAMPLED.replace("4bf9", "é9"),
        ] {
            assert_eq!(TraceContext::sampled(header), None, "{header}");
        }
    }
}
