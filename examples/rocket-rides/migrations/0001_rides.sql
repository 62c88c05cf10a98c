-- Rides, and the receipts to be sent for them. Several processes may execute this file, repeatedly and at the same time.
--
-- No constraint forbids a second ride of a rider, or a second receipt for a ride. The transactions that write the rows ensure
-- that each request has its effects once.

-- The lock lasts until the transaction ends. Two processes that create one table at the same time would fail.
select pg_advisory_xact_lock(7377001);

create table if not exists rides (
    id          bigint generated always as identity primary key,
    rider       text   not null,
    destination text   not null,
    -- In cents.
    fare        bigint not null,
    -- The provider's name for the card, never its number.
    card        text   not null,
    state       text   not null default 'created' check (state in ('created', 'charged', 'declined', 'booked')),
    -- The provider's name for the charge.
    charge      text,
    created     timestamptz not null default now()
);

-- A table of an earlier release lacks this column. Its rows count as created now. The block queries the catalog first, because
-- `alter table` waits for open transactions, and later transactions wait behind it.
do $$
begin
    if not exists (select from pg_attribute where attrelid = 'rides'::regclass and attname = 'created') then
        alter table rides add column created timestamptz not null default now();
    end if;
end
$$;

-- Jobs of the worker. A receipt is written with the outcome of the request, so each booked ride has one.
create table if not exists receipts (
    id          bigint generated always as identity primary key,
    ride        bigint not null references rides,
    recipient   text   not null,
    fare        bigint not null,
    -- The number of attempts to deliver it, including one that is in progress.
    attempts    integer not null default 0,
    delivered   timestamptz
);

-- `create index if not exists` locks the table before it looks for the index, so it would wait like `alter table`.
do $$
begin
    if not exists (select from pg_attribute where attrelid = 'receipts'::regclass and attname = 'attempts') then
        alter table receipts add column attempts integer not null default 0;
        -- The index of an earlier release has the column `id` only.
        drop index if exists receipts_to_deliver;
    end if;
    if to_regclass('receipts_to_deliver') is null then
        create index receipts_to_deliver on receipts (attempts, id) where delivered is null;
    end if;
end
$$;
