//! A cache for credentials that take longer to load than a call may take.

use std::{
    error::Error,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use aws_sdk_dynamodb::config::{
    ConfigBag, ResolveCachedIdentity, RuntimeComponents, SharedIdentityCache,
};
use aws_smithy_runtime_api::client::identity::{
    Identity, IdentityCachePartition, IdentityFuture, ResolveIdentity, SharedIdentityResolver,
};
use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use tokio::time::timeout;

/// A cache that loads credentials in a background task.
///
/// The SDK loads credentials within the timeout of the call that first needs them. If that call times out, the SDK drops
/// the load, and the next call starts another one.
#[derive(Debug)]
pub(crate) struct BackgroundIdentityCache {
    cache: SharedIdentityCache,
    /// The current load. One identity is enough, because DynamoDB has one signing scheme and a client has one source of
    /// credentials.
    load: Arc<Mutex<Option<Load>>>,
}

/// The result of a background task that continues if its waiters are dropped.
type Load = Shared<BoxFuture<'static, Result<Identity, Arc<dyn Error + Send + Sync>>>>;

impl BackgroundIdentityCache {
    pub(crate) fn new(cache: SharedIdentityCache) -> Self {
        Self {
            cache,
            load: Arc::default(),
        }
    }
}

impl ResolveCachedIdentity for BackgroundIdentityCache {
    fn resolve_cached_identity<'a>(
        &'a self,
        resolver: SharedIdentityResolver,
        components: &'a RuntimeComponents,
        config: &'a ConfigBag,
    ) -> IdentityFuture<'a> {
        let resolver = SharedIdentityResolver::new(BackgroundResolver {
            resolver,
            load: Arc::clone(&self.load),
        });
        self.cache
            .resolve_cached_identity(resolver, components, config)
    }
}

/// The resolver that the cache calls if it has no valid credentials.
#[derive(Debug)]
struct BackgroundResolver {
    resolver: SharedIdentityResolver,
    load: Arc<Mutex<Option<Load>>>,
}

impl BackgroundResolver {
    /// Returns the current load, or one that completed while no call waited. Starts a load if there is none.
    fn current_load(&self, components: &RuntimeComponents) -> Load {
        let mut current = self.load.lock().unwrap_or_else(PoisonError::into_inner);
        current.take_if(|load| match load.clone().now_or_never() {
            None => false,
            // The credentials of a load that completed earlier may have expired.
            Some(Ok(identity)) => !is_valid(&identity),
            Some(Err(_)) => true,
        });
        let load = current.get_or_insert_with(|| self.spawn_load(components));
        load.clone()
    }

    fn spawn_load(&self, components: &RuntimeComponents) -> Load {
        let (resolver, components) = (self.resolver.clone(), components.clone());
        let load = async move {
            // Sources of credentials read nothing from the configuration.
            let config = ConfigBag::base();
            let identity = resolver.resolve_identity(&components, &config);
            timeout(LOAD_TIMEOUT, identity).await?
        };
        let task = tokio::spawn(load);
        let load = async {
            let result = task.await.unwrap_or_else(|error| Err(error.into()));
            result.map_err(Arc::from)
        };
        load.boxed().shared()
    }

    /// Removes the load, so that the next call to this resolver starts another one. The cache stores the result.
    fn remove_load(&self, load: &Load) {
        let mut current = self.load.lock().unwrap_or_else(PoisonError::into_inner);
        current.take_if(|it| it.ptr_eq(load));
    }
}

fn is_valid(identity: &Identity) -> bool {
    let end = identity.expiration();
    end.is_none_or(|end| SystemTime::now() < end)
}

impl ResolveIdentity for BackgroundResolver {
    fn resolve_identity<'a>(
        &'a self,
        components: &'a RuntimeComponents,
        _config: &'a ConfigBag,
    ) -> IdentityFuture<'a> {
        IdentityFuture::new(async move {
            let load = self.current_load(components);
            let result = load.clone().await;
            self.remove_load(&load);
            Ok(result?)
        })
    }

    fn cache_partition(&self) -> Option<IdentityCachePartition> {
        Some(self.resolver.cache_partition())
    }
}

/// Timeout of a load, which blocks all other loads: twice the SDK's own timeout (5 s).
const LOAD_TIMEOUT: Duration = Duration::from_secs(10);
