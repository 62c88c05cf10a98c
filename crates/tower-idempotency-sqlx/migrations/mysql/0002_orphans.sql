-- Index on the expiry of leases. Completers use it to find orphans.
-- May be run repeatedly, and by several processes at the same time. A process may get error 1061. The index exists then.

set @is_missing = (
    select count(*) = 0 from information_schema.statistics
    where table_schema = database() and table_name = 'tower_idempotency' and index_name = 'orphans'
);
set @add_index = if(@is_missing, 'create index orphans on `tower_idempotency` (completed, lease_ends)', 'do 0');
prepare add_index from @add_index;
execute add_index;
deallocate prepare add_index;
