-- Leases and records, one row for each key. Times are milliseconds since 1970, by the clock of this server.
-- May be run again and again, and by several at once.

-- Until this script's transaction ends; "if not exists" alone fails when two create the table at once.
select pg_advisory_xact_lock(x'746f7765725f6964'::bigint);

create table if not exists "tower_idempotency" (
    id              bytea   not null primary key check (octet_length(id) = 32),
    token           bytea   check (octet_length(token) = 16),
    fingerprint     bytea   not null check (octet_length(fingerprint) = 32),
    generation      bigint  not null check (generation > 0),
    lease_ends      bigint  not null,
    keep            bigint  not null,
    forgotten_at    bigint  not null,
    created         bigint  not null,
    completed       bigint,
    record          bytea,
    owner           text    not null,
    operation       text    not null,
    awaited         boolean not null default false,
    checkpoint      text,
    checkpoint_data bytea,
    check ((completed is null) = (record is null))
);

-- Records come compressed.
alter table "tower_idempotency" alter column record set storage external;

create index if not exists "tower_idempotency_forgotten_at" on "tower_idempotency" (forgotten_at);
