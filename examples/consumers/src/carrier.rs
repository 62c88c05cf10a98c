use std::{
    fmt,
    path::{Path, PathBuf},
};

use tokio::{fs::OpenOptions, io::AsyncWriteExt};

use crate::Failure;

/// A carrier whose service has no idempotency keys: each call sends a parcel.
///
/// It is a file with a line for each parcel. So the parcels are not in the database of the queue, and no transaction covers
/// both.
#[derive(Clone, Debug)]
pub struct Carrier(PathBuf);

/// The reason why a parcel has no confirmation, and if it may be sent.
#[derive(Debug)]
pub enum Unsent {
    /// The parcel is not sent, and a retry may succeed: the carrier is closed.
    Not(Failure),
    /// The parcel is not sent, and no retry will succeed: the carrier refuses the order.
    Never(Failure),
    /// The parcel may be sent: the carrier did not confirm it.
    Perhaps(Failure),
}

impl Carrier {
    /// Returns the carrier whose parcels are in the file at `path`.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Sends a parcel for `order`, such as `tea to Vienna`.
    ///
    /// # Errors
    ///
    /// Returns [`Unsent`] if the parcel is not sent, or the outcome is unknown.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the parcel may be sent.
    pub async fn send(&self, order: &str) -> Result<(), Unsent> {
        let is_valid = !order.contains(['\n', '\r']) && order.contains(" to ");
        if !is_valid {
            return Err(Unsent::Never("the order has no address".into()));
        }
        let mut file = OpenOptions::new();
        let file = file.append(true).create(true).open(&self.0).await;
        let mut file = file.map_err(|error| Unsent::Not(error.into()))?;
        let sent = async {
            // A single write: lines of several processes never mix.
            file.write_all(format!("{order}\n").as_bytes()).await?;
            file.flush().await
        };
        sent.await.map_err(|error| Unsent::Perhaps(error.into()))
    }
}

impl fmt::Display for Unsent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Not(error) | Self::Never(error) | Self::Perhaps(error)) = self;
        error.fmt(f)
    }
}
