-- Finds what is leased by when its lease ends, for those who look for orphans. It is small: a completed row is not in it.
-- May be run again and again, and by several at once; run it in a transaction.

select pg_advisory_xact_lock(x'746f7765725f6964'::bigint);

do $$
begin
    -- Its name is that of the table with this behind it.
    if exists (
        select from pg_index join pg_class on pg_class.oid = indexrelid
        where indrelid = to_regclass('"tower_idempotency"') and right(relname, 8) = '_orphans'
    ) then
        return;
    end if;

    create index "tower_idempotency_orphans" on "tower_idempotency" (lease_ends, id) where completed is null;
end
$$;
