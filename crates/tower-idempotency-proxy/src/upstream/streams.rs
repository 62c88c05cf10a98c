//! Connections with HTTP/2 that requests share, and their streams.

use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use hyper::client::conn::http2;
use tokio::{
    runtime::Handle,
    sync::{Mutex as AsyncMutex, Notify},
    time::{Instant, timeout},
};

use crate::body::RequestBody;

/// Number of kept responses from which further requests share no connection. Responses that are open then are kept too. Each one
/// has at most the window of its stream. A request that timed out counts too, see [`MAX_KEPT_REQUEST_BYTES`].
const MAX_KEPT: usize = 256;

/// Largest size of the timed-out requests of a connection that are kept: their bodies, and [`REQUEST_OVERHEAD`] for each.
///
/// If the upstream does not read these bodies, they take a part of the window of the connection, for which other requests wait.
/// This is a quarter of the smallest window (RFC 9113, section 6.9.2). Some servers extend it only after half of it was read.
const MAX_KEPT_REQUEST_BYTES: u64 = 16 * 1024;
/// Size that counts for each timed-out request in addition to its body. So a connection keeps at most 16 of them, and one
/// connection does not reach [`MAX_KEPT`].
const REQUEST_OVERHEAD: u64 = 1024;

/// Number of requests after which a connection gets no further one.
///
/// Some servers end a connection after a number of requests, nginx after 1,000 by default. Requests that are on the way then have
/// an unknown outcome.
const MAX_REQUESTS: usize = 500;
/// Time after which a connection gets no further request. nginx ends a connection after one hour by default.
const MAX_AGE: Duration = Duration::from_secs(30 * 60);

/// Connections with HTTP/2 that several requests share.
#[derive(Default)]
pub(super) struct SharedConnections {
    /// There is one, unless it has as many streams as the upstream allows.
    open: Mutex<Vec<SharedConnection>>,
    /// Locked while a request connects. Requests that find room on an open connection do not wait for it.
    pub(super) connecting: AsyncMutex<()>,
    /// Longest time for which [`OpenStream::keep`] keeps an unread response. `None` if it keeps none.
    keep_limit: Option<Duration>,
    /// Each response that is kept has a clone.
    kept: Arc<()>,
}

impl SharedConnections {
    /// Creates connections whose streams are kept open for up to `limit`, as in [`OpenStream::keep`].
    pub(super) fn with_keep_limit(limit: Duration) -> Self {
        Self {
            keep_limit: Some(limit),
            ..Self::default()
        }
    }

    pub(super) fn open(&self) -> MutexGuard<'_, Vec<SharedConnection>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a stream on a connection with room for it. Returns a handle to the connection and the stream.
    ///
    /// Removes a connection whose budget is used up. The connection ends after its streams.
    pub(super) fn open_stream(
        self: &Arc<Self>,
    ) -> Option<(http2::SendRequest<RequestBody>, Stream)> {
        let mut open = self.open();
        let mut is_first = true;
        open.retain(|connection| {
            !connection.sender.is_closed()
                && !connection.budget.is_used_up()
                && (mem::take(&mut is_first) || connection.open_streams() > 0)
        });
        let connection = open.iter_mut().find(|connection| connection.has_room())?;
        Some(connection.open_stream(self))
    }

    /// Opens no further stream on the connection of this one.
    pub(super) fn discard(&self, stream: &OpenStream) {
        let mut open = self.open();
        open.retain(|connection| !Arc::ptr_eq(&connection.streams, &stream.streams));
    }

    /// Returns `true` if the response of a further request could be kept.
    pub(super) fn can_keep(&self) -> bool {
        // One more than the number of kept responses.
        Arc::strong_count(&self.kept) <= MAX_KEPT
    }
}

/// An open stream of a shared connection. The bodies of its request and its response have a clone each.
pub(crate) type Stream = Arc<OpenStream>;

/// Counts a stream of a connection as open until it is dropped, or until its response is kept.
#[derive(Debug)]
pub(crate) struct OpenStream {
    streams: Arc<Streams>,
    connections: Weak<SharedConnections>,
    keep_limit: Option<Duration>,
    has_ended: AtomicBool,
}

impl OpenStream {
    fn new(connections: &Arc<SharedConnections>, streams: &Arc<Streams>) -> Stream {
        streams.open.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self {
            streams: Arc::clone(streams),
            connections: Arc::downgrade(connections),
            keep_limit: connections.keep_limit,
            has_ended: AtomicBool::new(false),
        })
    }

    /// Counts the stream as ended, once.
    fn end(&self) {
        let has_ended = self.has_ended.swap(true, Ordering::AcqRel);
        if !has_ended && self.streams.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.streams.ended.notify_waiters();
        }
    }

    /// Keeps `unread`, whose drop resets the stream, while other requests use the connection. Drops it at once if the connections
    /// have no limit of that time.
    ///
    /// Some servers close a connection after a few resets, and all requests on it would have an unknown outcome. The connection
    /// gets no further request, so the others end. `unread` must not be polled: its window then stops the upstream.
    pub(crate) fn keep(&self, unread: impl Send + 'static) {
        let Some(limit) = self.keep_limit else {
            return;
        };
        // Without the pool, no request opens a stream.
        let kept = self.connections.upgrade().map(|connections| {
            connections.discard(self);
            Arc::clone(&connections.kept)
        });
        let streams = Arc::clone(&self.streams);
        // The request body may have a clone of the stream until the upstream has read it.
        self.end();
        // Without a runtime, the connections have ended.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                let _ = timeout(limit, streams.unused()).await;
                drop(unread);
                drop(kept);
            });
        }
    }

    /// Keeps a request that timed out, as in [`keep`](Self::keep). `size` is the size of its body. Drops it at once if the
    /// connection would keep too many bytes of such requests: the reset then frees the window for the other requests.
    pub(super) fn keep_request(&self, request: impl Send + 'static, size: u64) {
        if self.streams.reserve_kept(size) {
            self.keep(request);
        }
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.end();
    }
}

/// The numbers of streams of a connection.
#[derive(Debug, Default)]
pub(super) struct Streams {
    open: AtomicUsize,
    /// The number that the upstream allows now.
    limit: AtomicUsize,
    /// Notified when no stream is open.
    ended: Notify,
    /// Size of the requests for which [`reserve_kept`](Self::reserve_kept) returned `true`. No later request uses the connection,
    /// so it need not decrease.
    kept_request_bytes: AtomicU64,
}

impl Streams {
    pub(super) fn update(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Returns `true` if the connection may keep a further request that timed out, with a body of this size.
    fn reserve_kept(&self, size: u64) -> bool {
        let reserve = |kept: u64| {
            let kept = kept.saturating_add(size).saturating_add(REQUEST_OVERHEAD);
            (kept <= MAX_KEPT_REQUEST_BYTES).then_some(kept)
        };
        self.kept_request_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve)
            .is_ok()
    }

    /// Waits until no stream is open. The connection must have been discarded.
    async fn unused(&self) {
        // Receives each notification from here on.
        let ended = self.ended.notified();
        if self.open.load(Ordering::Acquire) > 0 {
            ended.await;
        }
    }
}

/// A connection with HTTP/2.
pub(super) struct SharedConnection {
    pub(super) sender: http2::SendRequest<RequestBody>,
    pub(super) streams: Arc<Streams>,
    pub(super) budget: ConnectionBudget,
}

impl SharedConnection {
    /// Returns `true` if the head of a request would be sent at once. hyper queues a request that exceeds the limit of the
    /// upstream.
    fn has_room(&self) -> bool {
        self.open_streams() < self.streams.limit.load(Ordering::Relaxed)
    }

    /// Returns a handle to the connection, and a stream of it.
    pub(super) fn open_stream(
        &mut self,
        connections: &Arc<SharedConnections>,
    ) -> (http2::SendRequest<RequestBody>, Stream) {
        self.budget.count_request();
        let stream = OpenStream::new(connections, &self.streams);
        (self.sender.clone(), stream)
    }

    fn open_streams(&self) -> usize {
        self.streams.open.load(Ordering::Relaxed)
    }
}

/// The requests that a connection may still get, and the time for them.
#[derive(Debug)]
pub(super) struct ConnectionBudget {
    requests: usize,
    expiry: Instant,
}

impl Default for ConnectionBudget {
    fn default() -> Self {
        Self {
            requests: MAX_REQUESTS,
            expiry: Instant::now() + MAX_AGE,
        }
    }
}

impl ConnectionBudget {
    fn count_request(&mut self) {
        self.requests = self.requests.saturating_sub(1);
    }

    fn is_used_up(&self) -> bool {
        self.requests == 0 || Instant::now() >= self.expiry
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use ::tests::barrier::eventually;
    use tokio::{runtime, time::sleep};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn connections() -> Arc<SharedConnections> {
        Arc::new(SharedConnections::with_keep_limit(LIMIT))
    }

    /// Returns two streams of one connection.
    fn two_streams(connections: &Arc<SharedConnections>) -> [Stream; 2] {
        let streams = Arc::default();
        [(); 2].map(|()| OpenStream::new(connections, &streams))
    }

    /// Keeps a response. Its body is the only other clone of the result until it is dropped.
    fn keep(stream: Stream) -> Arc<()> {
        let body = Arc::new(());
        stream.keep(Arc::clone(&body));
        drop(stream);
        body
    }

    fn is_kept(body: &Arc<()>) -> bool {
        Arc::strong_count(body) > 1
    }

    #[tokio::test(start_paused = true)]
    async fn response_is_kept_until_others_end() {
        let connections = connections();
        let [cancelled, other] = two_streams(&connections);
        let body = keep(cancelled);
        sleep(LIMIT / 2).await;
        assert!(is_kept(&body));
        let ended = Instant::now();
        drop(other);
        eventually("the response is dropped", || !is_kept(&body)).await;
        assert!(ended.elapsed() < LIMIT / 4, "{:?}", ended.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn kept_response_waits_for_no_upload() {
        let connections = connections();
        let [cancelled, other] = two_streams(&connections);
        drop(other);
        let _upload = Arc::clone(&cancelled);
        let began = Instant::now();
        let body = keep(cancelled);
        eventually("the response is dropped", || !is_kept(&body)).await;
        assert!(began.elapsed() < LIMIT / 4, "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn kept_responses_wait_for_no_other() {
        let connections = connections();
        let began = Instant::now();
        let bodies = two_streams(&connections).map(keep);
        eventually("the responses are dropped", || !bodies.iter().any(is_kept)).await;
        assert!(began.elapsed() < LIMIT / 4, "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn response_is_kept_for_limited_time() {
        let connections = connections();
        let [cancelled, _other] = two_streams(&connections);
        let body = keep(cancelled);
        sleep(LIMIT * 3 / 4).await;
        assert!(is_kept(&body));
        sleep(LIMIT / 2).await;
        assert!(!is_kept(&body));
    }

    #[tokio::test(start_paused = true)]
    async fn response_without_lease_is_dropped_at_once() {
        let connections = Arc::default();
        let [cancelled, _other] = two_streams(&connections);
        assert!(!is_kept(&keep(cancelled)));
    }

    #[tokio::test(start_paused = true)]
    async fn kept_responses_are_counted() {
        let connections = connections();
        let [_other, stream] = two_streams(&connections);
        let cancel = || keep(OpenStream::new(&connections, &stream.streams));
        let mut kept = (1..MAX_KEPT).map(|_| cancel()).collect::<Vec<_>>();
        assert!(connections.can_keep());
        kept.push(cancel());
        assert!(!connections.can_keep());
        sleep(LIMIT * 2).await;
        assert!(!kept.iter().any(is_kept));
        assert!(connections.can_keep());
    }

    /// Returns the number of requests that a connection keeps if 20 requests with a body of this size time out.
    fn count_kept_requests(size: u64) -> usize {
        let connections = connections();
        let [_other, stream] = two_streams(&connections);
        let requests = [(); 20].map(|()| {
            let request = Arc::new(());
            let timed_out = OpenStream::new(&connections, &stream.streams);
            timed_out.keep_request(Arc::clone(&request), size);
            request
        });
        requests.iter().filter(|request| is_kept(request)).count()
    }

    /// The other requests wait for the window that unread bodies take.
    #[tokio::test(start_paused = true)]
    async fn kept_requests_leave_window() {
        for (size, kept) in [
            (0, 16),
            (1, 15),
            (1024, 8),
            (15 * 1024, 1),
            (15 * 1024 + 1, 0),
            (u64::MAX, 0),
        ] {
            assert_eq!(count_kept_requests(size), kept, "{size}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn budget_expires() {
        let budget = ConnectionBudget::default();
        sleep(MAX_AGE * 9 / 10).await;
        assert!(!budget.is_used_up());
        sleep(MAX_AGE / 5).await;
        assert!(budget.is_used_up());
    }

    /// Keeps a response when it is dropped.
    struct KeptByDrop(Option<(Stream, Arc<()>)>);

    impl Drop for KeptByDrop {
        fn drop(&mut self) {
            if let Some((stream, body)) = self.0.take() {
                stream.keep(body);
            }
        }
    }

    #[test]
    fn kept_response_ends_with_runtime() {
        let runtime = runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let connections = connections();
        let [cancelled, other] = two_streams(&connections);
        let dropped_late = Arc::new(());
        let late = OpenStream::new(&connections, &other.streams);
        let late = KeptByDrop(Some((late, Arc::clone(&dropped_late))));
        let body = runtime.block_on(async {
            tokio::spawn(async move {
                let _late = late;
                pending::<()>().await;
            });
            let body = keep(cancelled);
            sleep(Duration::from_millis(1)).await;
            body
        });
        assert!(is_kept(&body) && is_kept(&dropped_late));
        // The drop of the task keeps another response.
        drop(runtime);
        assert!(!is_kept(&body) && !is_kept(&dropped_late));
        assert!(!is_kept(&keep(other)));
    }
}
