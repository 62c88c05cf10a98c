//! The header `Retry-After` (RFC 9110, section 10.2.3).

use std::time::{Duration, SystemTime};

use http::{HeaderMap, header};

/// Returns the delay that the server requests, or `None` if the header is missing or invalid.
///
/// A date is compared with the header `Date` of the response, so that the difference between the clocks does not matter. A
/// date in the past means no delay. A number of seconds that is too large counts as `u64::MAX`.
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // Only a number that is too large fails here.
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
    }
    let at = httpdate::parse_http_date(value).ok()?;
    let now = headers
        .get(header::DATE)
        .and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok())
        .unwrap_or_else(SystemTime::now);
    Some(at.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn parsed(value: &'static str) -> Option<Duration> {
        let date = HeaderValue::from_static("Sun, 06 Nov 1994 08:49:37 GMT");
        let headers = HeaderMap::from_iter([
            (header::DATE, date),
            (header::RETRY_AFTER, HeaderValue::from_static(value)),
        ]);
        retry_after(&headers)
    }

    #[test]
    fn seconds_are_whole_numbers() {
        assert_eq!(parsed("0"), Some(Duration::ZERO));
        assert_eq!(parsed("120"), Some(Duration::from_secs(120)));
        assert_eq!(parsed(" 7 "), Some(Duration::from_secs(7)));
        let huge = Some(Duration::from_secs(u64::MAX));
        assert_eq!(parsed("100000000000000000000"), huge);
    }

    #[test]
    fn dates_are_relative_to_date_of_response() {
        let minute = Some(Duration::from_secs(60));
        assert_eq!(parsed("Sun, 06 Nov 1994 08:50:37 GMT"), minute);
        assert_eq!(parsed("Sunday, 06-Nov-94 08:50:37 GMT"), minute);
        assert_eq!(parsed("Sun Nov  6 08:50:37 1994"), minute);
        assert_eq!(
            parsed("Sun, 06 Nov 1994 08:00:00 GMT"),
            Some(Duration::ZERO)
        );
    }

    #[test]
    fn date_without_date_of_response_is_relative_to_clock() {
        let in_an_hour = SystemTime::now() + Duration::from_secs(3600);
        let value = httpdate::fmt_http_date(in_an_hour);
        let value = HeaderValue::from_str(&value).unwrap();
        let delay = retry_after(&HeaderMap::from_iter([(header::RETRY_AFTER, value)])).unwrap();
        let range = Duration::from_secs(3000)..=Duration::from_secs(3600);
        assert!(range.contains(&delay), "{delay:?}");
    }

    #[test]
    fn garbage_is_no_delay() {
        for value in [
            "",
            "soon",
            "-5",
            "1.5",
            "5 s",
            "0x10",
            "Sun, 99 Nov 1994 08:49:37 GMT",
        ] {
            assert_eq!(parsed(value), None, "{value}");
        }
    }
}
