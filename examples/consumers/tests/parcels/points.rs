//! Points on the way between the program and its database at which a process is killed.

use consumers::retry_queue::State;
use tests::{
    proxy::Fault,
    servers::redis::scripts::{ACQUIRE, COMPLETE, RELEASE},
};
use tower_idempotency_redis::redis::Script;

/// A statement of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Statement {
    /// The queue delivers a message.
    Receive,
    /// The layer acquires the lease.
    Acquire,
    /// The layer records the effect.
    Complete,
    /// The layer releases the key after an attempt without an effect.
    Release,
    /// The queue moves the message to this state.
    MoveTo(State),
}

/// The moment of the kill, relative to the execution of the statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// The database never gets the statement.
    Before,
    /// The database executes the statement, and the process gets no reply.
    After,
}

pub(crate) type Point = (Statement, Moment);

/// The database, and its protocol.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Postgres,
    Redis,
}

impl Kind {
    pub(crate) fn fault(self, (statement, moment): Point) -> Fault {
        let bytes = self.bytes(statement);
        match moment {
            Moment::Before => Fault::request(bytes),
            Moment::After => Fault::reply_to(bytes),
        }
    }

    /// Returns bytes that the client sends in this statement only.
    ///
    /// PostgreSQL gets the text of a statement of the queue once, before its execution, so the bytes are those of an
    /// argument.
    fn bytes(self, statement: Statement) -> Vec<u8> {
        let sha = |code| Script::new(code).get_hash().as_bytes().to_vec();
        match (self, statement) {
            (Self::Postgres, Statement::Receive) => {
                [&8_i32.to_be_bytes()[..], &VISIBILITY.to_be_bytes()].concat()
            }
            (Self::Postgres, Statement::Acquire) => b"with asked as materialized".to_vec(),
            (Self::Postgres, Statement::Complete) => b"with ended as (\n  insert".to_vec(),
            (Self::Postgres, Statement::Release) => b"with freed as (".to_vec(),
            (Self::Postgres, Statement::MoveTo(state)) => {
                let name = state.name().as_bytes();
                let length = i32::try_from(name.len()).expect("a short name");
                [&length.to_be_bytes()[..], name].concat()
            }
            (Self::Redis, Statement::Receive) => argument(&VISIBILITY.to_string()),
            (Self::Redis, Statement::Acquire) => sha(ACQUIRE),
            (Self::Redis, Statement::Complete) => sha(COMPLETE),
            (Self::Redis, Statement::Release) => sha(RELEASE),
            (Self::Redis, Statement::MoveTo(state)) => argument(state.name()),
        }
    }
}

fn argument(text: &str) -> Vec<u8> {
    format!("${}\r\n{text}\r\n", text.len()).into_bytes()
}

/// The visibility in milliseconds of processes that are killed: a number that occurs nowhere else.
pub(crate) const VISIBILITY: i64 = 1_201_234;
