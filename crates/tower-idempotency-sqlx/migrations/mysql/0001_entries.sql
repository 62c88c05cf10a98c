-- Leases and records, one row for each key. Times are milliseconds since 1970, by the clock of this server.
-- May be run repeatedly, and by several processes at the same time. If the table exists, this only reads: "if not exists" alone
-- would need the right to create tables.

set @is_missing = (
    select count(*) = 0 from information_schema.tables
    where table_schema = database() and table_name = 'tower_idempotency'
);
set @create_table = if(@is_missing, 'create table if not exists `tower_idempotency` (
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
) engine = InnoDB default character set utf8mb4 collate utf8mb4_bin', 'do 0');
prepare create_table from @create_table;
execute create_table;
deallocate prepare create_table;
