-- Leases and records, one row for each key. Times are milliseconds since 1970, by the clock of this server.
-- May be run repeatedly, and by several processes at the same time. Run it in a transaction. If the table exists, this
-- only reads. "if not exists" would wait for running transactions, and later transactions would wait for it.

-- The lock lasts until the transaction ends. Two processes that create one table at the same time would fail.
select pg_advisory_xact_lock(x'746f7765725f6964'::bigint);

do $$
begin
    if to_regclass('"tower_idempotency"') is not null then
        return;
    end if;

    create table "tower_idempotency" (
        id               bytea   not null primary key check (octet_length(id) = 32),
        token            bytea   check (octet_length(token) = 16),
        fingerprint      bytea   not null check (octet_length(fingerprint) = 32),
        generation       bigint  not null check (generation > 0),
        lease_ends       bigint  not null,
        orphan_retention bigint  not null,
        expires          bigint  not null,
        created          bigint  not null,
        completed        bigint,
        owner            text    not null,
        operation        text    not null,
        awaited          boolean not null default false,
        checkpoint       text,
        checkpoint_data  bytea,
        record           bytea,
        check ((completed is null) = (record is null))
    );

    -- Records are compressed before they are stored.
    alter table "tower_idempotency" alter column record set storage external;

    create index "tower_idempotency_expires" on "tower_idempotency" (expires, id);
end
$$;
