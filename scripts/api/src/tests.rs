use std::{collections::HashMap, io, path::Path};

use crate::{api, differences};

/// Returns the lines of a crate of these files.
fn lines(files: &[(&str, &str)]) -> Result<Vec<String>, String> {
    let files: HashMap<&str, &str> = files.iter().copied().collect();
    api(Path::new("src/lib.rs"), &|path| {
        let file = path.to_str().and_then(|path| files.get(path));
        file.map(|text| (*text).to_owned())
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    })
}

#[track_caller]
fn assert_lines(files: &[(&str, &str)], expected: &[&str]) {
    assert_eq!(lines(files).expect("a crate"), expected);
}

fn assert_root(source: &str, expected: &[&str]) {
    assert_lines(&[("src/lib.rs", source)], expected);
}

#[test]
fn only_reachable_items_are_listed() {
    assert_lines(
        &[
            (
                "src/lib.rs",
                "mod inner; pub mod open; pub use self::inner::{a::*, Shown}; fn own() {}",
            ),
            (
                "src/inner/mod.rs",
                "pub mod a; pub struct Shown; pub struct Hidden; impl Hidden { pub fn f() {} }",
            ),
            ("src/inner/a.rs", "pub fn all() {} pub(crate) fn not() {}"),
            ("src/open.rs", "pub enum Choice { A, B(u8), C { d: u8, } }"),
        ],
        &[
            "struct Shown",
            "fn all()",
            "mod open",
            "enum open::Choice",
            "variant open::Choice::A",
            "variant open::Choice::B(u8)",
            "variant open::Choice::C { d: u8 }",
        ],
    );
}

#[test]
fn types_have_public_paths() {
    let source = "
        mod inner {
            use std::{sync::Arc, time};
            use super::other::{Part, Secret};
            pub struct Whole<S> { pub part: Part, secret: Secret, state: S }
            impl<S: Clone> Whole<S> {
                pub fn part(self, after: time::Duration, mut name: &str) -> Arc<Part> { todo!() }
                fn secret(&self) -> Secret { todo!() }
            }
            impl<S> Whole<S> where S: Iterator {
                pub async fn next(mut self) -> <S as Iterator>::Item { todo!() }
            }
        }
        mod other { pub struct Part(u8); pub struct Secret; }
        pub mod parts { pub use crate::other::Part; }
        pub use inner::Whole;";
    assert_root(
        source,
        &[
            "struct Whole<S> { .. }",
            "async fn Whole::next(self) -> <S as Iterator>::Item in impl<S> Whole<S> where S: Iterator",
            "field Whole::part: parts::Part",
            "fn Whole::part(self, after: std::time::Duration, name: &str) -> std::sync::Arc<parts::Part> in impl<S: Clone> Whole<S>",
            "mod parts",
            "struct parts::Part(..)",
        ],
    );
}

#[test]
fn implementations_are_listed_with_their_types() {
    let source = "
        use std::fmt;
        mod private { pub trait Internal {} pub struct Kind; }
        #[derive(Clone, Debug)]
        pub struct A;
        impl fmt::Display for A { fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { Ok(()) } }
        impl Iterator for A { type Item = u8; fn next(&mut self) -> Option<u8> { None } }
        impl private::Internal for A {}
        impl From<private::Kind> for A { fn from(_: private::Kind) -> Self { A } }
        impl From<A> for u8 { fn from(_: A) -> Self { 0 } }";
    assert_root(
        source,
        &[
            "struct A",
            "impl Clone for A",
            "impl Iterator for A",
            "impl std::fmt::Debug for A",
            "impl std::fmt::Display for A",
            "type A::Item = u8 in Iterator",
            "impl From<A> for u8",
        ],
    );
}

#[test]
fn traits_are_listed_with_their_items() {
    let source = "
        pub trait Store: Send + 'static {
            const LIMIT: usize = 1;
            type Error: std::error::Error;
            fn get(&self, key: [u8; 32]) -> impl Future<Output = Result<(), Self::Error>> + Send;
            fn close(self) where Self: Sized {}
        }";
    assert_root(
        source,
        &[
            "trait Store: Send + 'static",
            "type Store::Error: std::error::Error",
            "const Store::LIMIT: usize = ..",
            "fn Store::close(self) where Self: Sized { .. }",
            "fn Store::get(&self, key: [u8; 32]) -> impl Future<Output = Result<(), Self::Error>> + Send",
        ],
    );
}

#[test]
fn conditions_and_attributes_are_shown() {
    let source = r#"
        #[cfg(feature = "x")] pub mod x {
            #[must_use = "why"] pub fn f() {}
            #[doc(hidden)] pub fn g() {}
        }
        #[cfg(test)] pub mod tests {}
        #[cfg(not(feature = "x"))] pub fn without() {}
        #[non_exhaustive] pub struct S {}"#;
    assert_root(
        source,
        &[
            "#[non_exhaustive] struct S {}",
            "mod x [feature = \"x\"]",
            "#[must_use] fn x::f() [feature = \"x\"]",
            "#[doc(hidden)] fn x::g() [feature = \"x\"]",
        ],
    );
}

#[test]
fn items_of_macros_are_listed() {
    let source = "
        pin_project! { pub struct Body<B> { #[pin] inner: B, } }
        macro_rules! ids { ($name:ident) => { impl $name { pub fn id() {} } } }
        macro_rules! names { ($name:ident) => { const NAME: &str = \"\"; } }
        pub struct A;
        ids!(A);
        names!(A);
        #[macro_export] macro_rules! cases { ($case:expr) => {}; () => {}; }";
    assert_root(
        source,
        &[
            "struct A",
            "struct Body<B> { .. }",
            "macro cases! ($case: expr)",
            "macro cases! ()",
            "macro ids!(A) = ($name: ident) => { impl $name { pub fn id() {} } }",
        ],
    );
}

#[test]
fn private_alias_in_signature_is_listed() {
    let source = "mod a { pub(crate) type Bytes = Vec<u8>; } pub fn f(b: a::Bytes) {}";
    assert_root(
        source,
        &["type crate::a::Bytes = Vec<u8>", "fn f(b: crate::a::Bytes)"],
    );
}

#[test]
fn unreadable_item_fails() {
    for source in [
        "#[cfg(target_os = \"linux\")] pub fn f() {}",
        "mod absent;",
        "pub use self::absent::Item;",
        "#[path = \"other.rs\"] mod a;",
    ] {
        assert!(lines(&[("src/lib.rs", source)]).is_err(), "{source}");
    }
}

#[test]
fn changed_signature_is_reported() {
    let lines = ["fn a()", "fn b(x: u8)", "fn d()"].map(str::to_owned);
    assert_eq!(
        differences("fn a()\nfn b()\nfn c()\n", &lines),
        ["- fn b()", "+ fn b(x: u8)", "- fn c()", "+ fn d()"]
    );
    assert!(differences("fn a()\nfn b(x: u8)\nfn d()\n", &lines).is_empty());
}
