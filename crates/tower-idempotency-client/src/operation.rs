//! Operations of a client. All attempts of an operation have one key.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering},
    },
    time::{Duration, SystemTime},
};

use http::HeaderValue;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use crate::{
    first_sent::FirstSent,
    key::{InvalidKey, Key},
    protocol::Protocol,
};

/// Operation of the client: one key, and the state of all attempts under it.
///
/// The client creates one operation for each intended effect, and stores the [key](Self::key) with the data of the
/// operation. It puts a clone into the extensions of the request. Clones share their state. After the call,
/// [`outcome`](Self::outcome) shows if the client may delete the key.
/// ```
/// use http::Request;
/// use tower_idempotency_client::{Operation, Outcome};
///
/// let operation = Operation::new();
/// // Store `operation.key()` with the order, then send the request.
/// let request = Request::post("https://api.example.com/orders").extension(operation.clone()).body(())?;
///
/// assert_eq!(operation.key().len(), 36);
/// assert_eq!(operation.attempts(), 0);
/// assert_eq!(operation.outcome(), Outcome::NotExecuted);
/// # Ok::<(), http::Error>(())
/// ```
///
/// A caller that knows a key may be able to request the recorded response. To prevent keys in logs, the type has no
/// `Display`, and its `Debug` output does not contain the key.
#[derive(Clone)]
pub struct Operation(Arc<OperationState>);

struct OperationState {
    key: Key,
    first_sent: Mutex<Option<FirstSent>>,
    attempts: AtomicU32,
    /// Number of attempts that may have been executed.
    open_attempts: AtomicU32,
    /// Response of the operation: [`NO_RESPONSE`], [`RESPONSE`] or [`RESPONSE_LOST`].
    response: AtomicU8,
    provider: OnceLock<u64>,
    /// `true` if the key layer has counted an attempt that no `RetryLayer` has taken over.
    is_counted: AtomicBool,
}

/// State of an [`Operation`], as far as its client knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// No attempt was executed: none was sent, or the server rejected each one before it executed it.
    NotExecuted,
    /// The server sent the response of the operation: a success, or a failure that a retry does not change.
    Definite,
    /// The server sent the response of the operation, but its body did not arrive. The same request under the same key gets
    /// it.
    ResponseLost,
    /// An attempt may have been executed, and its response is unknown.
    Unknown,
}

impl Outcome {
    /// Returns `true` if the client may delete the key.
    ///
    /// Otherwise the client must not delete the key. It sends the same request again under the key, or reports the key to
    /// the operator. A new key would execute the operation a second time.
    #[must_use]
    pub const fn can_delete_key(self) -> bool {
        matches!(self, Self::NotExecuted | Self::Definite)
    }
}

impl Operation {
    /// Creates an operation whose key is a random UUID (version 4), as recommended in
    /// draft-ietf-httpapi-idempotency-key-header-07, section 2.2.
    ///
    /// # Panics
    ///
    /// If the operating system provides no randomness.
    #[must_use]
    pub fn new() -> Self {
        Self::from_key(Key::uuid(random_bytes(), 4))
    }

    /// Creates an operation whose key is a UUID of version 7, which begins with the time.
    ///
    /// Use it for protocols that require this version, such as the REST catalog of Apache Iceberg. The key shows the server
    /// when the operation began, and only 74 of its bits are random.
    ///
    /// # Panics
    ///
    /// If the operating system provides no randomness.
    #[must_use]
    pub fn new_v7() -> Self {
        let mut bytes = random_bytes();
        let millis = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |elapsed| elapsed.as_millis());
        bytes[..6].copy_from_slice(&millis.to_be_bytes()[10..]);
        Self::from_key(Key::uuid(bytes, 7))
    }

    /// Creates an operation with a key of the caller, for example from its database, from a form or from a message.
    ///
    /// # Errors
    ///
    /// If the key is empty, longer than 255 bytes, begins or ends with a space, or contains anything but printable ASCII.
    pub fn with_key(key: impl AsRef<str>) -> Result<Self, InvalidKey> {
        Key::new(key.as_ref().as_bytes()).map(Self::from_key)
    }

    /// Creates an operation whose key is derived from the parts of its name. Examples of parts are the ID of a message and
    /// the name of the effect. The key is a UUID of version 8 from the SHA-256 digest of all parts and their lengths.
    ///
    /// Pass a *name* of the operation, and never its content: two equal orders are two operations. The parts must not
    /// change between attempts. A client that can guess the parts can guess the key.
    ///
    /// ```
    /// use tower_idempotency_client::Operation;
    ///
    /// let charge = Operation::derived(&[b"message-17", b"charge"]);
    /// assert_eq!(charge.key(), Operation::derived(&[b"message-17", b"charge"]).key());
    /// assert_ne!(charge.key(), Operation::derived(&[b"message-17", b"refund"]).key());
    /// ```
    ///
    /// An earlier delivery of the message may have sent the operation. So a consumer calls
    /// [`with_first_sent`](Self::with_first_sent) with the time at which the message was published. No attempt was earlier, so
    /// no attempt begins after the lifetime of the key. A rejection then does not count as proof that nothing was executed.
    ///
    /// ```
    /// use std::time::SystemTime;
    /// use tower_idempotency_client::{Operation, Outcome};
    ///
    /// # let published = SystemTime::now();
    /// let charge = Operation::derived(&[b"message-17", b"charge"]).with_first_sent(published);
    /// assert_eq!(charge.outcome(), Outcome::Unknown);
    /// ```
    #[must_use]
    pub fn derived(name: &[&[u8]]) -> Self {
        let mut digest = Sha256::new();
        for part in name {
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part);
        }
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest.finalize()[..16]);
        Self::from_key(Key::uuid(bytes, 8))
    }

    /// Restores the time of the first attempt, of an operation that another process may have sent.
    ///
    /// The operation then counts as sent: its outcome is [`Outcome::Unknown`] until a response proves otherwise. If the time is
    /// more than a minute in the future, a clock is wrong, and no attempt begins. If the operation was already sent at another
    /// time, the earlier time counts. Two times that differ by less than a millisecond are the same.
    #[must_use]
    pub fn with_first_sent(self, at: SystemTime) -> Self {
        let restored = FirstSent::restored(at);
        {
            let mut first_sent = self.0.first_sent();
            let is_new = first_sent.is_none_or(|first| !is_same_time(at, first.wall));
            // Entries have times in milliseconds. A time that is earlier by less than that is the same one.
            let after = at.checked_add(Duration::from_millis(1));
            let is_replaced = first_sent.is_none_or(|first| {
                let is_corrected = !is_new && first.was_in_future();
                restored.was_in_future()
                    || is_corrected
                    || after.is_some_and(|after| after < first.wall)
            });
            if is_replaced {
                let earlier = *first_sent;
                *first_sent = Some(earlier.map_or(restored, |first| restored.known_since(first)));
            }
            if is_new {
                self.0.open_attempts.fetch_add(1, Ordering::Relaxed);
            }
        }
        self
    }

    /// Restores the [provider](Self::provider) that got the first attempt. Has no effect if the operation has one.
    #[must_use]
    pub fn with_provider(self, provider: u64) -> Self {
        self.0.provider.get_or_init(|| provider);
        self
    }

    /// Returns the key, without the quotes of the header.
    #[must_use]
    pub fn key(&self) -> &str {
        self.0.key.as_str()
    }

    /// Returns the number of attempts of this process that began.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.0.attempts.load(Ordering::Relaxed)
    }

    /// Returns the time at which the first attempt began, or `None` if there was none.
    #[must_use]
    pub fn first_sent(&self) -> Option<SystemTime> {
        self.0.first_sent().map(|first| first.wall)
    }

    /// Returns the provider that [`ProviderChoice`](crate::ProviderChoice) chose for the first attempt, or `None` if it
    /// chose none.
    #[must_use]
    pub fn provider(&self) -> Option<u64> {
        self.0.provider.get().copied()
    }

    /// Returns the outcome that is known now.
    ///
    /// A call that is cancelled while the server may execute its request leaves [`Outcome::Unknown`]. If a call with an
    /// outbox is cancelled after its definite response arrived, the outcome is [`Outcome::ResponseLost`].
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        match self.0.response.load(Ordering::Relaxed) {
            RESPONSE => Outcome::Definite,
            RESPONSE_LOST => Outcome::ResponseLost,
            _ if self.0.open_attempts.load(Ordering::Relaxed) == 0 => Outcome::NotExecuted,
            _ => Outcome::Unknown,
        }
    }

    /// Returns `true` for two clones of one operation.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns `true` if an attempt may have been executed.
    pub(crate) fn is_open(&self) -> bool {
        self.outcome() != Outcome::NotExecuted
    }

    /// Creates the state of a request that has no key. No caller gets it.
    pub(crate) fn without_key() -> Self {
        Self::from_key(Key::none())
    }

    pub(crate) fn from_key(key: Key) -> Self {
        Self(Arc::new(OperationState {
            key,
            first_sent: Mutex::new(None),
            attempts: AtomicU32::new(0),
            open_attempts: AtomicU32::new(0),
            response: AtomicU8::new(NO_RESPONSE),
            provider: OnceLock::new(),
            is_counted: AtomicBool::new(false),
        }))
    }

    /// Returns the value of the key header.
    pub(crate) fn header(&self, protocol: Protocol) -> Option<HeaderValue> {
        let quoted = match protocol {
            Protocol::TowerIdempotency | Protocol::Idempo => self.0.key.needs_quotes(),
            Protocol::Ietf => true,
            Protocol::Stripe | Protocol::Acp => false,
        };
        self.0.key.header(quoted)
    }

    /// Returns `true` if the server may have deleted the record of the operation.
    pub(crate) fn is_older_than(&self, lifetime: Duration) -> bool {
        let first_sent = *self.0.first_sent();
        first_sent.is_some_and(|first| first.is_older_than(lifetime))
    }

    /// Returns `true` if the restored time of the first attempt was in the future.
    pub(crate) fn was_sent_in_future(&self) -> bool {
        let first_sent = *self.0.first_sent();
        first_sent.is_some_and(|first| first.was_in_future())
    }

    /// Counts an attempt that is about to be sent. It may have been executed until [`close_attempt`](Self::close_attempt).
    pub(crate) fn begin_attempt(&self, now: Instant) {
        self.0
            .first_sent()
            .get_or_insert_with(|| FirstSent::new(now));
        self.0.attempts.fetch_add(1, Ordering::Relaxed);
        self.0.open_attempts.fetch_add(1, Ordering::Relaxed);
    }

    /// Marks an attempt as possibly executed, now or later, without counting it.
    pub(crate) fn open_attempt(&self) {
        self.0.open_attempts.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an attempt that a `RetryLayer` inside takes over, if there is one.
    pub(crate) fn begin_counted_attempt(&self, now: Instant) {
        self.begin_attempt(now);
        self.0.is_counted.store(true, Ordering::Relaxed);
    }

    /// Removes the attempt that the key layer has counted, because a `RetryLayer` counts its own. Has no effect for further
    /// clones of the request.
    pub(crate) fn adopt_attempt(&self) {
        if self.0.is_counted.swap(false, Ordering::Relaxed) {
            self.0.attempts.fetch_sub(1, Ordering::Relaxed);
            self.close_attempt();
        }
    }

    /// Marks an attempt as not executed.
    pub(crate) fn close_attempt(&self) {
        self.0.open_attempts.fetch_sub(1, Ordering::Relaxed);
    }

    /// Marks the response of the operation as received.
    pub(crate) fn set_response(&self) {
        self.0.response.store(RESPONSE, Ordering::Relaxed);
    }

    /// Marks the body of the response as lost.
    pub(crate) fn set_response_lost(&self) {
        self.0.response.store(RESPONSE_LOST, Ordering::Relaxed);
    }

    /// Returns the provider of the first attempt, or that of `choose`.
    pub(crate) fn provider_or(&self, choose: impl FnOnce() -> u64) -> u64 {
        *self.0.provider.get_or_init(choose)
    }
}

impl OperationState {
    fn first_sent(&self) -> MutexGuard<'_, Option<FirstSent>> {
        self.first_sent
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Operation {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation")
            .field("attempts", &self.attempts())
            .field("outcome", &self.outcome())
            .finish_non_exhaustive()
    }
}

/// Returns `true` if both times are equal as entries store them, in milliseconds.
fn is_same_time(one: SystemTime, other: SystemTime) -> bool {
    let difference = one
        .duration_since(other)
        .unwrap_or_else(|error| error.duration());
    difference < Duration::from_millis(1)
}

fn random_bytes() -> [u8; 16] {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the operating system provides randomness");
    bytes
}

const NO_RESPONSE: u8 = 0;
const RESPONSE: u8 = 1;
const RESPONSE_LOST: u8 = 2;

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[test]
    fn random_keys_are_distinct_uuids() {
        let [one, other] = [Operation::new(), Operation::new()];
        assert_ne!(one.key(), other.key());
        for (operation, version) in [(one, b'4'), (other, b'4'), (Operation::new_v7(), b'7')] {
            let key = operation.key().as_bytes();
            assert_eq!(key.len(), 36);
            assert_eq!(key[14], version);
            assert!(b"89ab".contains(&key[19]), "variant of {}", operation.key());
        }
    }

    #[test]
    fn time_ordered_keys_begin_with_milliseconds() {
        let before = millis();
        let key = Operation::new_v7().key().replace('-', "");
        let stamp = u128::from_str_radix(&key[..12], 16).unwrap();
        assert!((before..=millis()).contains(&stamp), "{stamp}");
    }

    fn millis() -> u128 {
        SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_millis()
    }

    #[test]
    fn derived_key_depends_on_each_part_and_its_length() {
        let key = |name: &[&[u8]]| Operation::derived(name).key().to_owned();
        assert_eq!(key(&[b"ab", b"c"]), key(&[b"ab", b"c"]));
        let all = [
            key(&[b"ab", b"c"]),
            key(&[b"a", b"bc"]),
            key(&[b"abc"]),
            key(&[b"abc", b""]),
            key(&[]),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[..at].contains(one), "{at}");
        }
    }

    #[test]
    fn debug_output_hides_key() {
        let text = format!("{:?}", Operation::with_key("secret-17").unwrap());
        assert!(!text.contains("secret"), "{text}");
    }

    /// Another process may have sent the operation at each of the times.
    #[test]
    fn each_restored_time_opens_operation() {
        let at = SystemTime::now();
        for (other, is_open) in [
            (at + Duration::from_secs(10), true),
            (at - Duration::from_secs(10), true),
            (at + Duration::from_micros(900), false),
            (at - Duration::from_micros(900), false),
        ] {
            let operation = Operation::new().with_first_sent(at);
            operation.close_attempt();
            assert_eq!(operation.outcome(), Outcome::NotExecuted);
            let operation = operation.with_first_sent(other);
            assert_eq!(
                operation.outcome() == Outcome::Unknown,
                is_open,
                "{other:?}"
            );
            let earlier = if is_open { at.min(other) } else { at };
            assert_eq!(operation.first_sent(), Some(earlier));
        }
    }

    /// The clock was an hour behind when the time was restored first, and was corrected two hours later.
    #[tokio::test(start_paused = true)]
    async fn corrected_clock_permits_attempt() {
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        let at = SystemTime::now();
        let mut behind = FirstSent::restored(at + hours(1));
        behind.wall = at;
        let operation = Operation::new().with_first_sent(at);
        *operation.0.first_sent() = Some(behind);
        assert!(operation.was_sent_in_future());
        advance(hours(2)).await;
        let operation = operation.with_first_sent(at);
        assert!(!operation.was_sent_in_future());
        assert!(!operation.is_older_than(hours(3)));
        // The wall clock of the test does not advance.
        assert!(operation.is_older_than(hours(2)));
    }

    /// This process has sent the operation. A clock was wrong when another time was restored.
    #[tokio::test(start_paused = true)]
    async fn corrected_clock_keeps_age_of_attempt() {
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        let operation = Operation::new();
        operation.begin_attempt(Instant::now());
        advance(hours(20)).await;
        let at = SystemTime::now();
        let operation = operation.with_first_sent(at + hours(1));
        let operation = operation.with_first_sent(at + hours(1));
        assert!(operation.was_sent_in_future());
        operation.0.first_sent().as_mut().unwrap().wall = at;
        let operation = operation.with_first_sent(at);
        assert!(!operation.was_sent_in_future());
        assert!(operation.is_older_than(hours(20)));
    }

    #[test]
    fn restored_operation_counts_as_sent() {
        let at = SystemTime::now() - Duration::from_secs(60);
        let operation = Operation::new().with_first_sent(at).with_provider(7);
        assert_eq!(operation.first_sent(), Some(at));
        assert_eq!(operation.outcome(), Outcome::Unknown);
        assert_eq!(operation.provider(), Some(7));
    }
}
