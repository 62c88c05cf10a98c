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

-- Index on the expiry of leases. Completers use it to find orphans. It is small, because it omits completed rows.
-- May be run repeatedly, and by several processes at the same time.

create index if not exists "tower_idempotency_orphans" on "tower_idempotency" (lease_ends, id) where completed is null;

-- Index for the listings of operators: records that need attention. Their second byte is 2. It is small, because it omits
-- all other rows. May be run repeatedly, and by several processes at the same time.

create index if not exists "tower_idempotency_attention" on "tower_idempotency" (completed, id)
    where substr(record, 2, 1) = x'02';

-- Index for the listing of completed entries by their expiry. It omits leases and orphans, which the index on the expiry of
-- all rows has as well. May be run repeatedly, and by several processes at the same time.

create index if not exists "tower_idempotency_completed" on "tower_idempotency" (expires, id) where completed is not null;
