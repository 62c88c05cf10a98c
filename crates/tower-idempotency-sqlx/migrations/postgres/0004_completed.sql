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
