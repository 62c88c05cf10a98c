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
