-- Leases and records, one row for each key. Times are milliseconds since 1970, by the clock of this server.
-- May be run repeatedly, and by several processes at the same time.

create table if not exists `tower_idempotency` (
    id               binary(32)      not null primary key,
    token            binary(16),
    fingerprint      binary(32)      not null,
    generation       bigint          not null,
    lease_ends       bigint          not null,
    orphan_retention bigint          not null,
    expires          bigint          not null,
    created          bigint          not null,
    completed        bigint,
    owner            varchar(255)    not null,
    operation        varchar(255)    not null,
    checkpoint       varchar(255),
    checkpoint_data  longblob,
    record           longblob,
    index expires (expires)
) engine = InnoDB default character set utf8mb4 collate utf8mb4_bin;

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
