//! A client for commands, in RESP 2.

use std::{
    io::{self, BufRead, BufReader, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

/// A connection that waits up to 10 seconds for each reply.
#[derive(Debug)]
pub(super) struct Connection(BufReader<TcpStream>);

impl Connection {
    pub(super) fn open(address: SocketAddr, password: Option<&str>) -> io::Result<Self> {
        let patience = Duration::from_secs(10);
        let stream = TcpStream::connect_timeout(&address, patience)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_nodelay(true)?;
        let mut connection = Self(BufReader::new(stream));
        if let Some(password) = password {
            let refused = |error| io::Error::new(io::ErrorKind::PermissionDenied, error);
            connection.query(&["AUTH", password])?.map_err(refused)?;
        }
        Ok(connection)
    }

    /// Returns the reader of the server's further replies.
    pub(super) fn into_inner(self) -> BufReader<TcpStream> {
        self.0
    }

    /// Sends a command. Returns the reply, or the error reply of Redis.
    pub(super) fn query<A: AsRef<[u8]>>(
        &mut self,
        args: &[A],
    ) -> io::Result<Result<Reply, String>> {
        let mut bytes = format!("*{}\r\n", args.len()).into_bytes();
        for arg in args.iter().map(AsRef::as_ref) {
            bytes.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
            bytes.extend_from_slice(arg);
            bytes.extend_from_slice(b"\r\n");
        }
        self.0.get_mut().write_all(&bytes)?;
        reply(&mut self.0)
    }
}

/// A reply that is not an error. A number is represented by its text, and nil by an empty text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Bytes(Vec<u8>),
    List(Vec<Reply>),
}

impl Reply {
    /// Returns the text of the reply; a list has a line for each element.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            Self::List(list) => {
                let lines: Vec<_> = list.iter().map(Self::text).collect();
                lines.join("\n")
            }
        }
    }

    /// Returns the elements of a list, without nested lists.
    pub(super) fn elements(self) -> Vec<Vec<u8>> {
        let Self::List(list) = self else {
            return Vec::new();
        };
        let bytes = |element| match element {
            Self::Bytes(bytes) => Some(bytes),
            Self::List(_) => None,
        };
        list.into_iter().filter_map(bytes).collect()
    }
}

fn reply(stream: &mut impl BufRead) -> io::Result<Result<Reply, String>> {
    let unexpected = || io::Error::new(io::ErrorKind::InvalidData, "not a reply of Redis");
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let line = line.strip_suffix("\r\n").ok_or_else(unexpected)?;
    let (kind, rest) = line.split_at_checked(1).ok_or_else(unexpected)?;
    let length = || rest.parse::<i64>().map_err(|_| unexpected());
    match kind {
        "+" | ":" => Ok(Ok(Reply::Bytes(rest.into()))),
        "-" => Ok(Err(rest.to_owned())),
        "$" => {
            // A negative length means nil.
            let Ok(length) = usize::try_from(length()?) else {
                return Ok(Ok(Reply::Bytes(Vec::new())));
            };
            let mut bytes = vec![0; length + 2];
            stream.read_exact(&mut bytes)?;
            bytes.truncate(length);
            Ok(Ok(Reply::Bytes(bytes)))
        }
        "*" => {
            let mut list = Vec::new();
            let mut refusal = None;
            for _ in 0..length()? {
                match reply(stream)? {
                    Ok(element) => list.push(element),
                    Err(error) => refusal = Some(error),
                }
            }
            Ok(refusal.map_or(Ok(Reply::List(list)), Err))
        }
        _ => Err(unexpected()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_of_every_kind_become_text() {
        for (bytes, text) in [
            ("+OK\r\n", Ok("OK")),
            (":-3\r\n", Ok("-3")),
            ("$4\r\na\r\nb\r\n", Ok("a\r\nb")),
            ("$0\r\n\r\n", Ok("")),
            ("$-1\r\n", Ok("")),
            ("*-1\r\n", Ok("")),
            ("*3\r\n:1\r\n*2\r\n+a\r\n+b\r\n$-1\r\n", Ok("1\na\nb\n")),
            ("-ERR no\r\n", Err("ERR no")),
            ("*2\r\n-ERR no\r\n+a\r\n", Err("ERR no")),
        ] {
            let mut unread = bytes.as_bytes();
            let found = reply(&mut unread).unwrap().map(|reply| reply.text());
            let expected = text.map(str::to_owned).map_err(str::to_owned);
            assert_eq!(found, expected, "{bytes:?}");
            assert!(unread.is_empty(), "{bytes:?} must be read to its end");
        }
        for broken in ["", "+OK", "$5\r\nab\r\n", "\r\n", "?\r\n", "$x\r\n"] {
            assert!(reply(&mut broken.as_bytes()).is_err(), "{broken:?}");
        }
    }
}
