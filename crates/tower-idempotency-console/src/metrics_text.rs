//! Counters from the text format of Prometheus.

/// Returns the sum of all series of a counter, or `None` if there is none.
pub(crate) fn total(text: &str, name: &str) -> Option<f64> {
    let mut sum = None;
    for line in text.lines() {
        let Some(rest) = line.strip_prefix(name) else {
            continue;
        };
        // Label values may contain spaces, so the value is after the last brace.
        let value = match rest.as_bytes().first() {
            Some(b'{') => rest.rsplit_once('}').map(|(_, value)| value),
            Some(b' ') => Some(rest),
            _ => None,
        };
        let value = value.and_then(|value| value.split_whitespace().next());
        if let Some(Ok(value)) = value.map(str::parse::<f64>) {
            sum = Some(sum.unwrap_or(0.0) + value);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_added() {
        let text = "# HELP a_total text\n# TYPE a_total counter\na_total{code=\"x} 9\"} 2\na_total{code=\"y\"} 3\n\
                    a_total_more 7\nb_total 4\nc_total what\n";
        assert_eq!(total(text, "a_total"), Some(5.0));
        assert_eq!(total(text, "b_total"), Some(4.0));
        assert_eq!(total(text, "c_total"), None);
        assert_eq!(total(text, "d_total"), None);
    }
}
