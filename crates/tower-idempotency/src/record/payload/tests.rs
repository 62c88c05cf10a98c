//! The text of each error of the parser. None quotes the record.

use std::io;

use super::{MessagePackError, payload_error};

#[test]
fn parser_errors_have_these_texts() {
    let early_end = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let not_utf8 = String::from_utf8(vec![0xff]).expect_err("an invalid byte");
    let quoting = || "hunter2".to_owned();
    let lines = [
        MessagePackError::InvalidMarkerRead(early_end()),
        MessagePackError::InvalidDataRead(early_end()),
        MessagePackError::Syntax(quoting()),
        MessagePackError::OutOfRange,
        MessagePackError::LengthMismatch(2),
        MessagePackError::Utf8Error(not_utf8.utf8_error()),
        MessagePackError::DepthLimitExceeded,
        MessagePackError::Uncategorized(quoting()),
    ]
    .map(|error| payload_error(&error).to_string());
    insta::assert_snapshot!(lines.join("\n"), @r"
    unreadable record: expected MessagePack with named fields, found an early end
    unreadable record: expected MessagePack with named fields, found an early end
    unreadable record: expected MessagePack with named fields, found a field missing, given twice or of another type
    unreadable record: expected MessagePack with named fields, found a number out of range
    unreadable record: expected MessagePack with named fields, found a list of another length
    unreadable record: expected MessagePack with named fields, found text that is not UTF-8
    unreadable record: expected MessagePack with named fields, found fields nested too deep
    unreadable record: expected MessagePack with named fields, found something else
    ");
}
