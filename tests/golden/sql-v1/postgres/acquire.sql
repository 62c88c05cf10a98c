set transaction isolation level read committed; set local lock_timeout = 500;
with asked as materialized (
  select decode('{id}', 'hex') as id, decode('{token}', 'hex') as token, decode('{fingerprint}', 'hex') as fingerprint, floor(extract(epoch from clock_timestamp()) * 1000)::bigint as created
)
insert into "tower_idempotency" as e
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, owner, operation)
select id, token, fingerprint, 1, created + {lease}, {orphan_retention}, created + {lease} + {orphan_retention}, created, encode(decode('{owner}', 'hex'), 'escape'), encode(decode('{operation}', 'hex'), 'escape')
from asked
where not exists (select from "tower_idempotency" e where e.id = asked.id and (e.expires <= asked.created or e.completed is null and (e.token = asked.token or true and e.lease_ends <= asked.created and e.fingerprint = asked.fingerprint)) is not true)
on conflict (id) do update set
  token = excluded.token,
  fingerprint = case when e.expires > excluded.created then e.fingerprint else excluded.fingerprint end,
  generation = case when e.expires <= excluded.created then 1
                    when e.token = excluded.token then e.generation
                    else e.generation + 1 end,
  lease_ends = excluded.lease_ends,
  orphan_retention = excluded.orphan_retention,
  expires = excluded.expires,
  created = case when e.expires <= excluded.created then excluded.created else e.created end,
  completed = null,
  record = null,
  owner = excluded.owner,
  operation = excluded.operation,
  awaited = coalesce(e.awaited and e.token = excluded.token, false),
  checkpoint = case when e.expires > excluded.created then e.checkpoint end,
  checkpoint_data = case when e.expires > excluded.created then e.checkpoint_data end
where e.expires <= excluded.created or e.completed is null and (e.token = excluded.token or true and e.lease_ends <= excluded.created and e.fingerprint = excluded.fingerprint);
select e.completed is not null, coalesce(e.token = decode('{token}', 'hex'), false), e.expires <= now,
  encode(e.fingerprint, 'hex'), e.generation, e.lease_ends - now, encode(e.record, 'hex'), e.expires - now,
  encode(e.token, 'hex')
from "tower_idempotency" e, (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock where e.id = decode('{id}', 'hex');
