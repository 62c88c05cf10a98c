//! The file of an audit log. Its functions block the thread.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    path::PathBuf,
    thread,
    time::Duration,
};

use serde_json::Value;

/// A file to which audit lines are appended.
#[derive(Clone, Debug)]
pub(crate) struct AuditFile {
    pub(crate) path: PathBuf,
}

/// The file of a change. Both lines of the change are in this file, even if it is rotated meanwhile.
#[derive(Debug)]
pub(crate) struct OpenAuditFile {
    file: File,
}

impl AuditFile {
    /// Opens the file, and appends the first line of a change.
    pub(crate) fn open(&self, line: &str) -> io::Result<OpenAuditFile> {
        let mut opened = self.open_for_append()?;
        opened.append(line)?;
        Ok(opened)
    }

    /// Opens the file without a line. Creates a missing file. Fails for a pipe without a reader.
    pub(crate) fn open_for_append(&self) -> io::Result<OpenAuditFile> {
        #[cfg(unix)]
        if self.is_pipe() {
            let file = self.open_pipe()?;
            return Ok(OpenAuditFile { file });
        }
        // A user who may append to a log need not be allowed to read it.
        let file = append_options().read(true).open(&self.path);
        let file = file.or_else(|_| append_options().open(&self.path))?;
        Ok(OpenAuditFile { file })
    }

    /// Returns up to `limit` of the last lines, the last one first, and `true` if the whole file was read. Reads at most the
    /// last 256 KiB.
    ///
    /// A missing file has no lines.
    pub(crate) fn tail(&self, limit: usize) -> io::Result<(Vec<Value>, bool)> {
        let metadata = match fs::metadata(&self.path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), true)),
            Err(error) => return Err(error),
        };
        // A device or a pipe cannot be read back. Opening a pipe would wait for a writer.
        if !metadata.is_file() {
            return Ok((Vec::new(), false));
        }
        let mut file = File::open(&self.path)?;
        // The length of the open file: if the log was rotated meanwhile, it is another one.
        let metadata = file.metadata()?;
        file.seek(SeekFrom::Start(metadata.len().saturating_sub(TAIL)))?;
        let mut tail = Vec::new();
        file.take(TAIL).read_to_end(&mut tail)?;
        let lines = tail.rsplit(|byte| *byte == b'\n');
        let mut lines = lines.filter_map(parse_line);
        let last = lines.by_ref().take(limit).collect();
        Ok((last, metadata.len() <= TAIL && lines.next().is_none()))
    }
}

#[cfg(unix)]
impl AuditFile {
    fn is_pipe(&self) -> bool {
        use std::os::unix::fs::FileTypeExt as _;

        fs::metadata(&self.path).is_ok_and(|metadata| metadata.file_type().is_fifo())
    }

    /// Opens the pipe for writing alone. If this process could also read it, a line without another reader would be lost.
    fn open_pipe(&self) -> io::Result<File> {
        use rustix::fs::{Mode, OFlags, fcntl_setfl, open};

        // Without `NONBLOCK`, the call waits for a reader.
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let pipe = open(self.path.as_path(), flags, Mode::empty())?;
        // While the pipe is full, a write waits for the reader.
        fcntl_setfl(&pipe, OFlags::empty())?;
        Ok(pipe.into())
    }
}

impl OpenAuditFile {
    /// Appends the line under a lock of the file, so that lines of other processes are not mixed with it. Waits until the
    /// line is on the disk.
    pub(crate) fn append(&mut self, line: &str) -> io::Result<()> {
        self.lock()?;
        let written = self.write(line);
        self.file.unlock().ok();
        written
    }

    fn write(&mut self, line: &str) -> io::Result<()> {
        let is_file = self.file.metadata()?.is_file();
        let end = if is_file && self.may_end_within_line() {
            "\n"
        } else {
            ""
        };
        let line = format!("{end}{line}\n");
        self.file.write_all(line.as_bytes())?;
        // A pipe or a terminal has no disk to wait for.
        if is_file {
            self.file.sync_all()?;
        }
        Ok(())
    }

    /// Waits for another process that writes a line, for at most five seconds.
    fn lock(&self) -> io::Result<()> {
        for _ in 0..500 {
            match self.file.try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(10)),
                // A file system without locks.
                Err(TryLockError::Error(_)) => return Ok(()),
            }
        }
        let message = "another process holds the lock of the audit log";
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    }

    /// Returns `true` if the last line has no end, because the disk was full in the middle of it. Returns `true` if this process
    /// may not read the line, too. An empty line does no harm, and two lines in one are lost.
    fn may_end_within_line(&mut self) -> bool {
        let mut last = [0];
        // An empty file has no last byte.
        self.file.seek(SeekFrom::End(-1)).is_ok()
            && (self.file.read_exact(&mut last).is_err() || last != *b"\n")
    }
}

/// Returns the JSON object of a line. Returns `None` for another text, such as a line that a full disk cut off.
pub(crate) fn parse_line(line: &[u8]) -> Option<Value> {
    let line = serde_json::from_slice::<Value>(line).ok();
    line.filter(Value::is_object)
}

/// Returns the options that append to a file. A new file is readable for its owner only. The reasons in the log are for
/// operators, and a user who can open the file can hold its lock.
fn append_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).append(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// Bytes at the end of the file that `tail` reads.
const TAIL: u64 = 256 * 1024;

#[cfg(test)]
mod tests {
    use ::tests::scratch::Scratch;

    use super::*;

    fn file(scratch: &Scratch) -> AuditFile {
        AuditFile {
            path: scratch.file("log"),
        }
    }

    #[test]
    fn line_after_partial_line_is_complete() {
        let scratch = Scratch::new();
        let file = file(&scratch);
        fs::write(&file.path, "{\"line\":\"intent\",\"wh").unwrap();
        let mut opened = file.open("{\"line\":1}").unwrap();
        opened.append("{\"line\":2}").unwrap();
        let (lines, is_whole) = file.tail(10).unwrap();
        assert!(is_whole);
        let lines: Vec<_> = lines.iter().map(|it| it["line"].clone()).collect();
        assert_eq!(lines, [2, 1]);
    }

    /// The process may append to the log, and not read it.
    #[test]
    fn line_of_writer_without_reading_right_is_complete() {
        let scratch = Scratch::new();
        let file = file(&scratch);
        let append = |line: &str| {
            let opened = append_options().open(&file.path);
            let mut opened = OpenAuditFile {
                file: opened.unwrap(),
            };
            opened.append(line).unwrap();
        };
        append("{\"line\":1}");
        assert_eq!(fs::read_to_string(&file.path).unwrap(), "{\"line\":1}\n");
        fs::write(&file.path, "{\"line\":\"intent\",\"wh").unwrap();
        append("{\"line\":1}");
        append("{\"line\":2}");
        let (lines, _) = file.tail(10).unwrap();
        let lines: Vec<_> = lines.iter().map(|it| it["line"].clone()).collect();
        assert_eq!(lines, [2, 1]);
    }

    #[test]
    fn lines_of_several_writers_never_mix() {
        let scratch = Scratch::new();
        let file = file(&scratch);
        let line = format!("{{\"line\":\"{}\"}}", "x".repeat(3_000));
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..25 {
                        let mut opened = file.open(&line).unwrap();
                        opened.append(&line).unwrap();
                    }
                });
            }
        });
        let text = fs::read_to_string(&file.path).unwrap();
        assert_eq!(text.lines().count(), 400);
        assert!(text.lines().all(|it| it == line));
    }

    #[test]
    fn only_tail_is_read() {
        let scratch = Scratch::new();
        let file = file(&scratch);
        let line = format!("{{\"n\":\"{}\"}}\n", "x".repeat(1000));
        fs::write(&file.path, line.repeat(2000)).unwrap();
        let (lines, is_whole) = file.tail(usize::MAX).unwrap();
        assert!((200..=262).contains(&lines.len()), "{}", lines.len());
        assert!(!is_whole);
        let path = "/no/such/file".into();
        let (lines, is_whole) = AuditFile { path }.tail(1).unwrap();
        assert!(lines.is_empty() && is_whole);
    }

    #[cfg(unix)]
    #[test]
    fn log_is_private_and_pipe_has_no_lines() {
        use std::{os::unix::fs::PermissionsExt as _, process::Command};

        let scratch = Scratch::new();
        let file = file(&scratch);
        file.open("{}").unwrap();
        let mode = fs::metadata(&file.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // A pipe without a writer would block.
        let path = scratch.file("pipe");
        let made = Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let (lines, _) = AuditFile { path }.tail(10).unwrap();
        assert!(lines.is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn pipe_without_reader_is_error() {
        use std::process::Command;

        let scratch = Scratch::new();
        let path = scratch.file("pipe");
        let made = Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let file = AuditFile { path };
        assert!(file.open("{\"line\":1}").is_err());
        thread::scope(|scope| {
            let reader = scope.spawn(|| fs::read_to_string(&file.path).unwrap());
            // Until the reader has opened the pipe, it has none.
            let mut opened = loop {
                match file.open("{\"line\":1}") {
                    Ok(opened) => break opened,
                    Err(_) => thread::sleep(Duration::from_millis(1)),
                }
            };
            opened.append("{\"line\":2}").unwrap();
            drop(opened);
            assert_eq!(reader.join().unwrap(), "{\"line\":1}\n{\"line\":2}\n");
        });
        assert!(file.open("{\"line\":3}").is_err());
    }

    #[test]
    fn full_device_is_error() {
        let path = "/dev/full".into();
        assert!(AuditFile { path }.open("{}").is_err());
    }
}
