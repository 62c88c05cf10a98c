//! Credentials that take longer to load than a call may take.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use aws_sdk_dynamodb::config::{
    ConfigBag, ResolveCachedIdentity, RuntimeComponents, SharedIdentityCache,
};
use aws_smithy_runtime_api::{
    box_error::BoxError,
    client::identity::{
        Identity, IdentityCachePartition, IdentityFuture, ResolveIdentity, SharedIdentityResolver,
    },
};
use tokio::{sync::Mutex, task::JoinHandle, time::timeout};

/// A cache whose credentials are loaded in a task: the SDK loads them within the time of the call that needs them first, and
/// where that is over, begins anew with the next one.
#[derive(Debug)]
pub(crate) struct LoadedApart {
    cache: SharedIdentityCache,
    /// One is enough: DynamoDB has one scheme to sign by, and so a client has one source of credentials.
    loading: Arc<Mutex<Option<Loading>>>,
}

type Loading = JoinHandle<Result<Identity, BoxError>>;

impl LoadedApart {
    pub(crate) fn new(cache: SharedIdentityCache) -> Self {
        Self {
            cache,
            loading: Arc::default(),
        }
    }
}

impl ResolveCachedIdentity for LoadedApart {
    fn resolve_cached_identity<'a>(
        &'a self,
        resolver: SharedIdentityResolver,
        components: &'a RuntimeComponents,
        config: &'a ConfigBag,
    ) -> IdentityFuture<'a> {
        let apart = SharedIdentityResolver::new(Apart {
            resolver,
            loading: Arc::clone(&self.loading),
        });
        self.cache
            .resolve_cached_identity(apart, components, config)
    }
}

/// What the cache asks where it has none that are valid.
#[derive(Debug)]
struct Apart {
    resolver: SharedIdentityResolver,
    loading: Arc<Mutex<Option<Loading>>>,
}

impl Apart {
    fn load(&self, components: &RuntimeComponents) -> Loading {
        let (resolver, components) = (self.resolver.clone(), components.clone());
        tokio::spawn(async move {
            // Sources of credentials ask nothing of it.
            let config = ConfigBag::base();
            let loading = resolver.resolve_identity(&components, &config);
            timeout(PATIENCE, loading).await?
        })
    }
}

impl ResolveIdentity for Apart {
    fn resolve_identity<'a>(
        &'a self,
        components: &'a RuntimeComponents,
        _config: &'a ConfigBag,
    ) -> IdentityFuture<'a> {
        IdentityFuture::new(async move {
            let mut loading = self.loading.lock().await;
            // Nobody waited for its end, however long ago that was.
            if let Some(loaded) = loading.take_if(|it| it.is_finished())
                && let Ok(Ok(identity)) = loaded.await
                && identity
                    .expiration()
                    .is_none_or(|end| SystemTime::now() < end)
            {
                return Ok(identity);
            }
            let loaded = loading.get_or_insert_with(|| self.load(components)).await;
            *loading = None;
            loaded?
        })
    }

    fn cache_partition(&self) -> Option<IdentityCachePartition> {
        Some(self.resolver.cache_partition())
    }
}

/// How long credentials may take to load: one that hangs keeps all others from being loaded.
const PATIENCE: Duration = Duration::from_secs(60);
