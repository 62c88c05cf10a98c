use std::io;

use axum::Router;
use tokio::net::TcpListener;

/// Serves until the process ends, and says on stdout where: port 0 picks a free one.
///
/// # Errors
///
/// When the address is taken, or none.
///
/// # Cancellation
///
/// Dropped, it takes no more connections.
pub async fn serve(listen: &str, app: Router) -> io::Result<()> {
    let listener = TcpListener::bind(listen).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app).await
}
