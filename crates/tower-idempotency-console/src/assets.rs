//! The style sheet, the script and the icon. Their names contain a digest, so browsers may store them for a year.

use std::{fmt::Write as _, sync::OnceLock};

use axum::{
    extract::Path,
    response::{IntoResponse as _, Response},
};
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use sha2::{Digest as _, Sha256};

use crate::error::PageError;

const STYLE: &str = include_str!("../assets/console.css");
const SCRIPT: &str = include_str!("../assets/console.js");
const ICON: &str = include_str!("../assets/icon.svg");

pub(crate) fn style_name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| name(STYLE, "css"))
}

pub(crate) fn script_name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| name(SCRIPT, "js"))
}

pub(crate) fn icon_name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| name(ICON, "svg"))
}

fn name(contents: &str, extension: &str) -> String {
    let digest = Sha256::digest(contents.as_bytes());
    let mut name = String::new();
    for byte in &digest[..6] {
        let _ = write!(name, "{byte:02x}");
    }
    format!("{name}.{extension}")
}

pub(crate) async fn asset(Path(name): Path<String>) -> Result<Response, PageError> {
    let (media_type, contents) = if name == style_name() {
        ("text/css; charset=utf-8", STYLE)
    } else if name == script_name() {
        ("text/javascript; charset=utf-8", SCRIPT)
    } else if name == icon_name() {
        ("image/svg+xml", ICON)
    } else {
        return Err(PageError::not_found("There is no such file."));
    };
    let headers = [
        (CONTENT_TYPE, media_type),
        (CACHE_CONTROL, "private, max-age=31536000, immutable"),
    ];
    Ok((headers, contents).into_response())
}

const _: () = assert!(SCRIPT.len() < 4096, "the script stays small");
