//! Keys of the metrics of a layer that has a name.

use std::{
    borrow::Cow,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use ::metrics::{
    Counter, Gauge, Histogram, Key, Label, Level, Metadata, SharedString, with_recorder,
};
use hashbrown::HashMap;

use super::{METRICS, MetricKind};

/// Keys of the series of a layer. They are built once, so that a request builds none.
pub(crate) struct LayerKeys {
    layer: SharedString,
    /// The values of the own label of each metric, with their keys. A series without such a label has an empty value.
    by_metric: HashMap<&'static str, Vec<(&'static str, Key)>>,
}

/// The keys of all layers that have a name.
static ALL_KEYS: Mutex<Vec<Weak<LayerKeys>>> = Mutex::new(Vec::new());

fn all_keys() -> MutexGuard<'static, Vec<Weak<LayerKeys>>> {
    ALL_KEYS.lock().unwrap_or_else(PoisonError::into_inner)
}

static METADATA: Metadata<'static> =
    Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

impl LayerKeys {
    /// Builds the keys of the layer with this name.
    pub(crate) fn new(name: &str) -> Arc<Self> {
        let layer = SharedString::from_shared(Arc::from(name));
        let of_layer = METRICS.iter().filter(|metric| metric.is_of_layer);
        let by_metric = of_layer.map(|metric| {
            let mut keys: Vec<_> = metric
                .values
                .iter()
                .map(|&value| {
                    let own = Label::from_static_parts(metric.label, value);
                    (value, key(metric.name, Some(own), &layer))
                })
                .collect();
            if keys.is_empty() {
                keys.push(("", key(metric.name, None, &layer)));
            }
            (metric.name, keys)
        });
        let keys = Arc::new(Self {
            by_metric: by_metric.collect(),
            layer,
        });
        let mut all = all_keys();
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&keys));
        keys
    }

    /// Registers the series of all layers that have a name.
    pub(super) fn register_all() {
        // A recorder is foreign code: the lock is not held while it runs.
        let all: Vec<_> = all_keys().iter().filter_map(Weak::upgrade).collect();
        for keys in all {
            keys.register();
        }
    }

    /// Registers all series. A value that a series already has does not change.
    pub(crate) fn register(&self) {
        for metric in METRICS {
            for (_, key) in self.by_metric.get(metric.name).into_iter().flatten() {
                with_recorder(|recorder| match metric.kind {
                    MetricKind::Counter => recorder.register_counter(key, &METADATA).increment(0),
                    MetricKind::Gauge => recorder.register_gauge(key, &METADATA).increment(0.0),
                    MetricKind::Seconds | MetricKind::Bytes => {
                        drop(recorder.register_histogram(key, &METADATA));
                    }
                });
            }
        }
    }

    /// Returns a counter. `label` and `value` are empty if it has no label of its own.
    pub(crate) fn counter(&self, name: &'static str, label: &'static str, value: &str) -> Counter {
        let key = self.find(name, label, value);
        with_recorder(|recorder| recorder.register_counter(&key, &METADATA))
    }

    /// Returns a gauge without a label of its own.
    pub(crate) fn gauge(&self, name: &'static str) -> Gauge {
        let key = self.find(name, "", "");
        with_recorder(|recorder| recorder.register_gauge(&key, &METADATA))
    }

    /// Returns a histogram. `label` and `value` are empty if it has no label of its own.
    pub(crate) fn histogram(
        &self,
        name: &'static str,
        label: &'static str,
        value: &str,
    ) -> Histogram {
        let key = self.find(name, label, value);
        with_recorder(|recorder| recorder.register_histogram(&key, &METADATA))
    }

    /// Returns the key of a series. Builds it for a code of `NeedsAttention`, which a handler has chosen.
    fn find(&self, name: &'static str, label: &'static str, value: &str) -> Cow<'_, Key> {
        let mut keys = self.by_metric.get(name).into_iter().flatten();
        match keys.find(|(known, _)| *known == value) {
            Some((_, key)) => Cow::Borrowed(key),
            None => {
                let own = Label::new(label, value.to_owned());
                Cow::Owned(key(name, Some(own), &self.layer))
            }
        }
    }
}

/// Returns the key of a series of this layer, with its own label if it has one.
fn key(name: &'static str, own: Option<Label>, layer: &SharedString) -> Key {
    let layer = Label::new("layer", layer.clone());
    let labels: Vec<_> = own.into_iter().chain([layer]).collect();
    Key::from_parts(name, labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_dropped_layers_are_removed() {
        let kept = LayerKeys::new("kept");
        let is_known = || {
            all_keys()
                .iter()
                .any(|known| known.ptr_eq(&Arc::downgrade(&kept)))
        };
        for _ in 0..100 {
            drop(LayerKeys::new("dropped"));
        }
        assert!(is_known());
        let known = all_keys();
        let dropped = known.iter().filter(|known| known.strong_count() == 0);
        let dropped = dropped.count();
        drop(known);
        // Other tests create layers at the same time.
        assert!(dropped < 50, "{dropped} layers");
    }
}
