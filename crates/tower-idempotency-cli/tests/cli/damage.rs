//! A damaged record of an entry that needs attention.

use tests::scratch::Scratch;
use tower_idempotency::{NeedsAttention, inspect::Resolution};

use crate::{
    run_in,
    scenario::{acquire, claim, complete},
};

/// A store reads the code and the reason of such a record without its checksum.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_attention_record_has_warning() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = crate::open(&url).await.expect("a file");
    let attention = NeedsAttention::new("refund-failed").with_reason("refund re_7");
    let run = |args: &[&str]| run_in(scratch.path(), &url, args);
    for (n, is_damaged) in [(0xaa, false), (0xbb, true)] {
        let claim = claim(n);
        acquire(&store, &claim).await;
        let record = Resolution::NeedsAttention(attention.clone()).record(&claim.id);
        let (record, retention) = record.expect("it stores a record");
        let mut record = record.to_vec();
        if is_damaged {
            // The last byte of the reason.
            *record.last_mut().expect("a byte") ^= 1;
        }
        complete(&store, &claim, record.into(), retention).await;
        let id = format!("{n:x}").repeat(4);
        let shown = run(&["show", &id]);
        assert_eq!(shown.code, 0, "{shown:?}");
        assert!(shown.out.contains("needs-attention"), "{shown:?}");
        for part in ["problem", "expected the checksum", "do not trust its code"] {
            assert_eq!(shown.out.contains(part), is_damaged, "{part}: {shown:?}");
        }
        let json = run(&["show", &id, "--json"]).out;
        assert_eq!(json.contains("\"problem\":null"), !is_damaged, "{json}");
    }
    let resolve = |args: &[&str]| {
        let options = ["--reason", "examined", "--audit", "log", "--yes"];
        run(&[&["resolve", "bbbbbbbb"][..], args, &options].concat())
    };
    let deleted = resolve(&["delete-record", "--force"]);
    assert_eq!(deleted.code, 2, "{deleted:?}");
    // The new record has a checksum.
    let kept = resolve(&["needs-attention"]);
    assert_eq!(kept.code, 0, "{kept:?}");
    let shown = run(&["show", "bbbbbbbb"]).out;
    assert!(shown.contains("refund re_6 (damaged); examined"), "{shown}");
    assert_eq!(resolve(&["free"]).code, 0);
}
