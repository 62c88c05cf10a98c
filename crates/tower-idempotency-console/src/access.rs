use http::request::Parts;

/// Rights of a visitor, as the access hook of [`Console::new`](crate::Console::new) decides for each request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "an application decides between exactly these"
)]
pub enum Access {
    /// No page is shown. The response is 403.
    None,
    /// The visitor sees all pages and recorded responses, and changes nothing.
    Read {
        /// Name of the operator, for events.
        actor: Box<str>,
    },
    /// The visitor also resolves entries.
    Resolve {
        /// Name of the operator, for the audit log.
        actor: Box<str>,
    },
}

impl Access {
    /// Creates the right to read.
    #[must_use]
    pub fn read(actor: impl Into<Box<str>>) -> Self {
        Self::Read {
            actor: actor.into(),
        }
    }

    /// Creates the right to read and to resolve.
    #[must_use]
    pub fn resolve(actor: impl Into<Box<str>>) -> Self {
        Self::Resolve {
            actor: actor.into(),
        }
    }
}

pub(crate) type Hook = Box<dyn Fn(&Parts) -> Access + Send + Sync>;
