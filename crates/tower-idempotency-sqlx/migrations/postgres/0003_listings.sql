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
