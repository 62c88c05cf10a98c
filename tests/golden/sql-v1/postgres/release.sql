set transaction isolation level read committed; set local lock_timeout = 500;
with freed as (
  delete from "tower_idempotency" e using (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock
  where e.id = decode('{id}', 'hex') and e.token = decode('{token}', 'hex') and e.completed is null and e.expires > now and e.generation = 1 and e.checkpoint is null returning e.awaited
)
select pg_notify('tower_idempotency', '{id}') from freed where awaited;
with orphaned as (
  update "tower_idempotency" e set token = null, lease_ends = now, expires = now + orphan_retention
  from (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock where e.id = decode('{id}', 'hex') and e.token = decode('{token}', 'hex') and e.completed is null and e.expires > now and (e.generation > 1 or e.checkpoint is not null) returning e.awaited
)
select pg_notify('tower_idempotency', '{id}') from orphaned where awaited;
