set transaction isolation level read committed; set local lock_timeout = 500;
with ended as (
  insert into "tower_idempotency" as e
    (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, record, owner, operation)
  select decode('{id}', 'hex'), decode('{token}', 'hex'), decode('{fingerprint}', 'hex'), {generation}, now, 0, now + {retention}, now, now, decode('{record}', 'hex'), '', ''
  from (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock
  on conflict (id) do update set
    token = excluded.token,
    fingerprint = excluded.fingerprint,
    generation = case when e.token = excluded.token then e.generation else excluded.generation end,
    expires = excluded.expires,
    created = case when e.expires <= excluded.created then excluded.created else e.created end,
    completed = excluded.completed,
    record = excluded.record,
    owner = case when e.expires <= excluded.created then '' else e.owner end,
    operation = case when e.expires <= excluded.created then '' else e.operation end,
    checkpoint = case when e.expires > excluded.created and substring(excluded.record from 2 for 1) = '\x02'::bytea then e.checkpoint end,
    checkpoint_data = case when e.expires > excluded.created and substring(excluded.record from 2 for 1) = '\x02'::bytea then e.checkpoint_data end
  where e.expires <= excluded.created
    or e.completed is null and (e.token = excluded.token or e.token is null)
  returning e.awaited
)
select pg_notify('tower_idempotency', '{id}') from ended where awaited;
select e.completed is not null, coalesce(e.token = decode('{token}', 'hex'), false), e.expires <= now, e.token is null
from "tower_idempotency" e, (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock where e.id = decode('{id}', 'hex');
