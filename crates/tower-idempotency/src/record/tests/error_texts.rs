//! The text of each problem of a record. A new problem does not compile without a text in this list.

use std::iter::successors;

use crate::record::error::{Problem, RecordError};

#[test]
fn problems_have_these_texts() {
    let next = |problem: &Problem| {
        Some(match problem {
            Problem::Short { .. } => Problem::Version { found: 2 },
            Problem::Version { .. } => Problem::Flags { found: 3 },
            Problem::Flags { .. } => Problem::Sealed,
            Problem::Sealed => Problem::Checksum {
                written: 0x0102_0304,
                computed: 0x0a0b_0c0d,
            },
            Problem::Checksum { .. } => Problem::InflatedLimit {
                declared: 9,
                limit: 8,
            },
            Problem::InflatedLimit { .. } => Problem::InflatedLength {
                declared: 9,
                found: 8,
            },
            Problem::InflatedLength { found: 8, .. } => Problem::InflatedLength {
                declared: 9,
                found: 10,
            },
            Problem::InflatedLength { .. } => Problem::Deflate,
            Problem::Deflate => Problem::AfterDeflate { found: 3 },
            Problem::AfterDeflate { .. } => Problem::Payload {
                found: "no map of fields",
            },
            Problem::Payload { .. } => Problem::AfterPayload,
            Problem::AfterPayload => Problem::Missing { field: "body" },
            Problem::Missing { .. } => Problem::Kind,
            Problem::Kind => Problem::Code,
            Problem::Code => Problem::Reason,
            Problem::Reason => Problem::Status { found: 99 },
            Problem::Status { .. } => Problem::RecordedAt { found: u64::MAX },
            Problem::RecordedAt { .. } => Problem::BodyOf {
                status: 204,
                found: 5,
            },
            Problem::BodyOf { .. } => Problem::HeaderLines { limit: 128 },
            Problem::HeaderLines { .. } => Problem::HeaderName,
            Problem::HeaderName => Problem::HeaderValue,
            Problem::HeaderValue => return None,
        })
    };
    let lines: Vec<_> = successors(Some(Problem::Short { found: 5 }), next)
        .map(|problem| RecordError::from(problem).to_string())
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    unreadable record: expected at least 6 bytes, found 5
    unreadable record: expected version 1, found 2
    unreadable record: expected the flags 0, 1, 2 or 4, found 3
    unreadable record: expected a record in clear, found a sealed one, which a later version wrote
    unreadable record: expected the checksum 01020304 under this key, found 0a0b0c0d
    unreadable record: expected an inflated length of at most 8 bytes, found 9
    unreadable record: expected 9 bytes after inflating, found 8
    unreadable record: expected 9 bytes after inflating, found 10 or more
    unreadable record: expected a deflate stream, found something else
    unreadable record: expected nothing after the deflate stream, found 3 bytes
    unreadable record: expected MessagePack with named fields, found no map of fields
    unreadable record: expected nothing after the payload, found more
    unreadable record: expected the field body, found none
    unreadable record: expected one of the kinds response, tombstone, value and attention, each under its flags, found another
    unreadable record: expected a code of 1 to 64 of a-z, 0-9 and -, found something else
    unreadable record: expected one of the reasons too_large, streamed and panicked, found another
    unreadable record: expected a status from 200 to 999, found 99
    unreadable record: expected a time the system clock can show, found 18446744073709551615 ms
    unreadable record: expected no body under the status 204, found 5 bytes
    unreadable record: expected at most 128 header lines, found more
    unreadable record: expected lower-case header names, found something else
    unreadable record: expected valid header values, found something else
    ");
}
