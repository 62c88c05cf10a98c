//! Connections after an upgrade: bytes in both directions, until one side closes.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::Upgrade;

/// The open tunnels of a proxy. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Tunnels {
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Tunnels {
    /// Connects the two sides of an upgrade, in a task.
    pub(crate) fn open(&self, upgrade: Upgrade, upstream: OnUpgrade) {
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            let Upgrade { client, connection } = upgrade;
            let copy = async {
                let (client, upstream) = tokio::try_join!(client, upstream).ok()?;
                let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
                copy_bidirectional(&mut client, &mut upstream).await.ok()
            };
            tokio::select! {
                () = stop.cancelled() => {}
                _ = copy => {}
            }
            drop(connection);
        });
    }

    /// Waits until all tunnels are closed.
    pub(crate) async fn closed(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Closes all tunnels.
    pub(crate) fn stop(&self) {
        self.stop.cancel();
    }
}
