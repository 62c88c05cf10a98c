-- Leases and records, one row for each key. Times are milliseconds since 1970, by the clock of this machine.
-- May be run repeatedly, and by several processes at the same time.

create table if not exists "tower_idempotency" (
    id               blob    not null primary key check (length(id) = 32),
    token            blob    check (length(token) = 16),
    fingerprint      blob    not null check (length(fingerprint) = 32),
    generation       integer not null check (generation > 0),
    lease_ends       integer not null,
    orphan_retention integer not null,
    expires          integer not null,
    created          integer not null,
    completed        integer,
    owner            text    not null,
    operation        text    not null,
    checkpoint       text,
    checkpoint_data  blob,
    record           blob,
    check ((completed is null) = (record is null))
) strict;

create index if not exists "tower_idempotency_expires" on "tower_idempotency" (expires, id);
