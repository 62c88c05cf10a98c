//! An HTTP/1 connection that fails as soon as its server does.
//!
//! A pool that reconnects on its own would hide which process received a request, and when.

use std::{io, net::SocketAddr};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use tests::{TestResponse, wire::post_bytes};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    unread: BytesMut,
}

impl Connection {
    pub(super) async fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            unread: BytesMut::new(),
        })
    }

    /// Posts, and reads a response with a content length. After an error the connection cannot be used.
    pub(super) async fn post(
        &mut self,
        path: &str,
        key: &str,
        body: &str,
    ) -> io::Result<TestResponse> {
        self.stream.write_all(&post_bytes(path, key, body)).await?;
        let head = loop {
            if let Some(end) = self.unread.windows(4).position(|four| four == b"\r\n\r\n") {
                break self.unread.split_to(end + 4);
            }
            self.read_more().await?;
        };
        let (status, headers) = parse(&head).ok_or(io::ErrorKind::InvalidData)?;
        let length = headers.get(header::CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
        let body = self.take(length.ok_or(io::ErrorKind::InvalidData)?).await?;
        Ok(TestResponse {
            status,
            headers,
            body,
        })
    }

    async fn take(&mut self, length: usize) -> io::Result<Bytes> {
        while self.unread.len() < length {
            self.read_more().await?;
        }
        Ok(self.unread.split_to(length).freeze())
    }

    async fn read_more(&mut self) -> io::Result<()> {
        match self.stream.read_buf(&mut self.unread).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }
}

fn parse(head: &[u8]) -> Option<(StatusCode, HeaderMap)> {
    let mut lines = std::str::from_utf8(head).ok()?.split("\r\n");
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let mut headers = HeaderMap::new();
    for line in lines.take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':')?;
        let name: HeaderName = name.parse().ok()?;
        headers.append(name, HeaderValue::from_str(value.trim()).ok()?);
    }
    Some((status, headers))
}
