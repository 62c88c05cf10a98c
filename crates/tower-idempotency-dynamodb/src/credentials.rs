//! Credentials that take longer to load than a call may take.

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

/// A cache whose credentials are loaded in a task: the SDK loads them within the time of the call that needs them first, and
/// where that is over, begins anew with the next one.
#[derive(Debug)]
pub(crate) struct LoadedApart {
    cache: SharedIdentityCache,
    /// One is enough: DynamoDB has one scheme to sign by, and so a client has one source of credentials.
    loading: Arc<Mutex<Option<Loading>>>,
}

/// In a task, which goes on without those who wait for it.
type Loading = Shared<BoxFuture<'static, Result<Identity, Arc<dyn Error + Send + Sync>>>>;

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
    /// What is being loaded, or was when nobody waited for its end.
    fn loading(&self, components: &RuntimeComponents) -> Loading {
        let mut loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        loading.take_if(|it| match it.clone().now_or_never() {
            None => false,
            // However long ago that was.
            Some(Ok(identity)) => !is_valid(&identity),
            Some(Err(_)) => true,
        });
        let loading = loading.get_or_insert_with(|| self.load(components));
        loading.clone()
    }

    fn load(&self, components: &RuntimeComponents) -> Loading {
        let (resolver, components) = (self.resolver.clone(), components.clone());
        let load = async move {
            // Sources of credentials ask nothing of it.
            let config = ConfigBag::base();
            let loading = resolver.resolve_identity(&components, &config);
            timeout(PATIENCE, loading).await?
        };
        let load = tokio::spawn(load);
        let loaded = async {
            let loaded = load.await.unwrap_or_else(|ended| Err(ended.into()));
            loaded.map_err(Arc::from)
        };
        loaded.boxed().shared()
    }

    /// Whoever comes from now on begins anew: to keep what was loaded is for the cache.
    fn forget(&self, loaded: &Loading) {
        let mut loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        loading.take_if(|it| it.ptr_eq(loaded));
    }
}

fn is_valid(identity: &Identity) -> bool {
    let end = identity.expiration();
    end.is_none_or(|end| SystemTime::now() < end)
}

impl ResolveIdentity for Apart {
    fn resolve_identity<'a>(
        &'a self,
        components: &'a RuntimeComponents,
        _config: &'a ConfigBag,
    ) -> IdentityFuture<'a> {
        IdentityFuture::new(async move {
            let loading = self.loading(components);
            let loaded = loading.clone().await;
            self.forget(&loading);
            Ok(loaded?)
        })
    }

    fn cache_partition(&self) -> Option<IdentityCachePartition> {
        Some(self.resolver.cache_partition())
    }
}

/// How long credentials may take to load: one that hangs keeps all others from being loaded. Twice as long as the SDK has
/// patience with them.
const PATIENCE: Duration = Duration::from_secs(10);
