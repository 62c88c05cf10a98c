-- Finds what is leased by when its lease ends, for those who look for orphans.
-- May be run again and again. Of several that run it at once, those that come second may be told that the index is there
-- (1061), and then it is.

set @is_missing = (
    select count(*) = 0 from information_schema.statistics
    where table_schema = database() and table_name = 'tower_idempotency' and index_name = 'orphans'
);
set @add_index = if(@is_missing, 'create index orphans on `tower_idempotency` (completed, lease_ends)', 'do 0');
prepare add_index from @add_index;
execute add_index;
deallocate prepare add_index;
