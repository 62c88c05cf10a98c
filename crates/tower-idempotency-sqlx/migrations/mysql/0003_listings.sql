-- Column and index for the listings of operators: records that need attention. Their second byte is 2.
-- May be run repeatedly, and by several processes at the same time. A process may get error 1060. The column exists then.

set @is_missing = (
    select count(*) = 0 from information_schema.columns
    where table_schema = database() and table_name = 'tower_idempotency' and column_name = 'attention'
);
-- The column has the time of the record. It is null in all other rows, so it changes only with such a record.
set @add_column = if(
    @is_missing,
    'alter table `tower_idempotency`
        add column attention bigint as (if(substring(record, 2, 1) = 0x02, completed, null)) stored,
        add index attention (attention)',
    'do 0'
);
prepare add_column from @add_column;
execute add_column;
deallocate prepare add_column;
