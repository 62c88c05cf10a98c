-- Column and index for the listing of completed entries by their expiry. The index on the expiry of all rows also has leases and
-- orphans.
-- May be run repeatedly, and by several processes at the same time. A process may get error 1060. The column exists then.

set @is_missing = (
    select count(*) = 0 from information_schema.columns
    where table_schema = database() and table_name = 'tower_idempotency' and column_name = 'record_expires'
);
-- The column has the expiry of a completed row. It is null in all other rows.
set @add_column = if(
    @is_missing,
    'alter table `tower_idempotency`
        add column record_expires bigint as (if(completed is null, null, expires)) stored,
        add index completed (record_expires)',
    'do 0'
);
prepare add_column from @add_column;
execute add_column;
deallocate prepare add_column;
