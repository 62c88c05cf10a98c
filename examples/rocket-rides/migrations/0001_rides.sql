-- Rides, and the receipts that are to be sent for them. May be run again and again, and by several at once.
--
-- No constraint forbids a rider a second ride, or a ride a second receipt: that each request has its effects once is
-- the business of the transactions that write them.

-- Until the transaction ends. Two that create one table at once get in each other's way.
select pg_advisory_xact_lock(7377001);

create table if not exists rides (
    id          bigint generated always as identity primary key,
    rider       text   not null,
    destination text   not null,
    -- In cents.
    fare        bigint not null,
    -- The provider's name for it, never its number.
    card        text   not null,
    state       text   not null default 'created' check (state in ('created', 'charged', 'declined', 'booked')),
    -- The provider's name for what was charged.
    charge      text,
    created     timestamptz not null default now()
);

-- Where an earlier release made the table: what is there counts as created now. It only looks where it can: to alter a table
-- is to wait for the transactions of others, and to have whoever comes later wait as well.
do $$
begin
    if not exists (select from pg_attribute where attrelid = 'rides'::regclass and attname = 'created') then
        alter table rides add column created timestamptz not null default now();
    end if;
end
$$;

-- A job for the worker: written with the outcome of the request, so that there is one for each ride that was booked.
create table if not exists receipts (
    id          bigint generated always as identity primary key,
    ride        bigint not null references rides,
    recipient   text   not null,
    fare        bigint not null,
    delivered   timestamptz
);

create index if not exists receipts_to_deliver on receipts (id) where delivered is null;
