//! Spans in OTLP's JSON: the protobuf messages of `opentelemetry/proto/collector/trace/v1`. Identifiers are texts of
//! hexadecimal digits, 64-bit numbers are texts, and enumerations are numbers.

use serde_json::{Value, json};

use super::span::{Attribute, FinishedSpan, SpanKind};

/// Status code of a failed span, `STATUS_CODE_ERROR` in OTLP.
const STATUS_ERROR: u8 = 2;

/// Returns the body of a request that sends `spans`.
pub(super) fn request(instance: &str, spans: &[FinishedSpan]) -> Value {
    let resource = [
        ("service.name", "kvatlas"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("service.instance.id", instance),
    ];
    let resource = resource.map(|(key, text)| attribute(key, &Attribute::Text(text.to_owned())));
    json!({ "resourceSpans": [{
        "resource": { "attributes": resource },
        "scopeSpans": [{
            "scope": { "name": "kvatlas", "version": env!("CARGO_PKG_VERSION") },
            "spans": spans.iter().map(span).collect::<Vec<_>>(),
        }],
    }] })
}

fn span(span: &FinishedSpan) -> Value {
    let kind = match span.kind {
        SpanKind::Server => 2,
        SpanKind::Consumer => 5,
    };
    let status = match &span.error {
        Some(message) => json!({ "code": STATUS_ERROR, "message": message }),
        None => json!({}),
    };
    json!({
        "traceId": format!("{:032x}", span.context.trace_id),
        "spanId": format!("{:016x}", span.span_id),
        "parentSpanId": format!("{:016x}", span.context.parent_id),
        "name": span.name,
        "kind": kind,
        "startTimeUnixNano": nanoseconds(span.start_us),
        "endTimeUnixNano": nanoseconds(span.end_us),
        "attributes": span.attributes.iter().map(|(key, value)| attribute(key, value)).collect::<Vec<_>>(),
        "status": status,
    })
}

fn nanoseconds(time_us: u64) -> String {
    (u128::from(time_us) * 1000).to_string()
}

fn attribute(key: &str, value: &Attribute) -> Value {
    let value = match value {
        Attribute::Text(text) => json!({ "stringValue": text }),
        Attribute::Number(number) => json!({ "intValue": number.to_string() }),
    };
    json!({ "key": key, "value": value })
}

#[cfg(test)]
mod tests {
    use super::super::context::TraceContext;
    use super::*;

    #[test]
    fn the_form_is_that_of_otlp() {
        let context = TraceContext::sampled("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        let span = FinishedSpan {
            context: context.unwrap(),
            span_id: 0xb7,
            name: "query",
            kind: SpanKind::Server,
            start_us: 1_700_000_000_000_001,
            end_us: 1_700_000_000_000_003,
            attributes: vec![
                ("namespace", Attribute::Text("llama".to_owned())),
                ("blocks", Attribute::Number(u64::MAX)),
            ],
            error: Some("too deep".to_owned()),
        };
        let body = request("kvatlas@here:1", std::slice::from_ref(&span));
        let sent = &body["resourceSpans"][0];
        assert_eq!(
            sent["resource"]["attributes"][0]["value"]["stringValue"],
            "kvatlas"
        );
        let expected = json!({
            "traceId": "4bf92f3577b34da6a3ce929d0e0e4736",
            "spanId": "00000000000000b7",
            "parentSpanId": "00f067aa0ba902b7",
            "name": "query",
            "kind": 2,
            "startTimeUnixNano": "1700000000000001000",
            "endTimeUnixNano": "1700000000000003000",
            "attributes": [
                { "key": "namespace", "value": { "stringValue": "llama" } },
                { "key": "blocks", "value": { "intValue": "18446744073709551615" } },
            ],
            "status": { "code": 2, "message": "too deep" },
        });
        assert_eq!(sent["scopeSpans"][0]["spans"], json!([expected]));
    }
}
