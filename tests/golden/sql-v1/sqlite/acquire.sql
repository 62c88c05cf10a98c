insert into "tower_idempotency" as e
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, owner, operation)
select ?1, ?2, ?3, 1, now + ?4, ?5, now + ?4 + ?5, now, ?7, ?8 from (select cast(unixepoch('subsec') * 1000 as integer) as now) where true
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
  checkpoint = case when e.expires > excluded.created then e.checkpoint end,
  checkpoint_data = case when e.expires > excluded.created then e.checkpoint_data end
where e.expires <= excluded.created
  or e.completed is null and (e.token = excluded.token
    or (?6 or substr(e.token, 1, length(?9)) = ?9)
      and e.lease_ends <= excluded.created and e.fingerprint = excluded.fingerprint)
returning generation
