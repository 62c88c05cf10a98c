//! Responses of the upstream with a length and without a body (RFC 9110, section 8.6).

use crate::harness::{Script, Served, Upstream, config, pay_twice};

#[tokio::test]
async fn bodiless_response_with_length_is_recorded() {
    for (status, line) in [(204, "204 No Content"), (304, "304 Not Modified")] {
        let upstream = Upstream::start(move |_| {
            Script::reply(format!(
                "HTTP/1.1 {line}\r\nlocation: /1\r\ncontent-length: 27\r\n\r\n"
            ))
        });
        let upstream = upstream.await;
        let proxy = Served::start(&config(upstream.address, "", "")).await;
        pay_twice(proxy.address, status).await;
        assert_eq!(upstream.effects(), 1, "{line}");
    }
}
