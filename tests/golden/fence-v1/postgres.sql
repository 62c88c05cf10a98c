-- begin
begin transaction isolation level read committed, read write;

-- lease status
select coalesce(e.id = $1 and e.token = $2 and e.record is null and e.expires > now, false) as is_held, set_config('tower_idempotency.transaction', 'fenced', true) as mark
from "tower_idempotency" e, (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock where e.id = $1;

-- write record
with ended as (
  update "tower_idempotency" e set
    expires = now + $4,
    completed = now,
    record = $3,
    checkpoint = case when substring($3::bytea from 2 for 1) = decode('02', 'hex') then e.checkpoint end,
    checkpoint_data = case when substring($3::bytea from 2 for 1) = decode('02', 'hex') then e.checkpoint_data end
  from (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock where e.id = $1 and e.token = $2 and e.record is null and e.expires > now and coalesce(current_setting('tower_idempotency.transaction', true) = 'fenced', false) returning e.id, e.awaited
)
select coalesce(current_setting('tower_idempotency.transaction', true) = 'fenced', false) as is_marked, ended.awaited is not null as is_written,
  case when ended.awaited then pg_notify('tower_idempotency', encode(ended.id, 'hex'))::text end as notified
from (select 1) one left join ended on true;
