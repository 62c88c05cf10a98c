//! placeholder
pub(crate) fn canonical(_bytes: &[u8]) -> Option<Vec<u8>> {
    None
}
