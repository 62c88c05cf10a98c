insert into "tower_idempotency" as e
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, record, owner, operation)
select ?1, ?2, ?3, ?4, now, 0, now + ?5, now, now, ?6, '', '' from (select cast(unixepoch('subsec') * 1000 as integer) as now) where true
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
  checkpoint = case when e.expires > excluded.created and substr(excluded.record, 2, 1) = x'02' then e.checkpoint end,
  checkpoint_data = case when e.expires > excluded.created and substr(excluded.record, 2, 1) = x'02' then e.checkpoint_data end
where e.expires <= excluded.created
  or e.completed is null and (e.token = excluded.token or e.token is null)
returning 1
