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

-- Index on the expiry of leases. Completers use it to find orphans. It is small, because it omits completed rows.
-- May be run repeatedly, and by several processes at the same time. Run it in a transaction.

select pg_advisory_xact_lock(x'746f7765725f6964'::bigint);

do $$
begin
    -- The name of the index is the name of the table with this suffix.
    if exists (
        select from pg_index join pg_class on pg_class.oid = indexrelid
        where indrelid = to_regclass('"tower_idempotency"') and right(relname, 8) = '_orphans'
    ) then
        return;
    end if;

    create index "tower_idempotency_orphans" on "tower_idempotency" (lease_ends, id) where completed is null;
end
$$;

-- Index for the listings of operators: records that need attention.
-- May be run repeatedly, and by several processes at the same time. Run it in a transaction.

select pg_advisory_xact_lock(x'746f7765725f6964'::bigint);

do $$
begin
    -- The name of an index is the name of the table with a suffix.
    if not exists (
        select from pg_index join pg_class on pg_class.oid = indexrelid
        where indrelid = to_regclass('"tower_idempotency"') and right(relname, 10) = '_attention'
    ) then
        -- The second byte of a record that needs attention is 2. The index is small: it omits all other rows.
        create index "tower_idempotency_attention" on "tower_idempotency" (completed, id)
            where substring(record from 2 for 1) = '\x02'::bytea;
    end if;
end
$$;

-- Index for the listing of completed entries by their expiry. It omits leases and orphans, which the index on the expiry of
-- all rows has as well.
-- May be run repeatedly, and by several processes at the same time. Run it in a transaction.

select pg_advisory_xact_lock(x'746f7765725f6964'::bigint);

do $$
begin
    -- The name of the index is the name of the table with this suffix.
    if exists (
        select from pg_index join pg_class on pg_class.oid = indexrelid
        where indrelid = to_regclass('"tower_idempotency"') and right(relname, 10) = '_completed'
    ) then
        return;
    end if;

    create index "tower_idempotency_completed" on "tower_idempotency" (expires, id) where completed is not null;
end
$$;
