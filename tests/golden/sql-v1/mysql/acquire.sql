set transaction isolation level read committed; start transaction;
select coalesce(max((expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) or completed is null and (coalesce(token = x'{token}', false) or true and lease_ends <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) and fingerprint = x'{fingerprint}'))), true) into @free from `tower_idempotency` where id = x'{id}';
insert into `tower_idempotency`
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, owner, operation)
select x'{id}', x'{token}', x'{fingerprint}', 1, now + {lease}, {orphan_retention}, now + {lease} + {orphan_retention}, now, convert(x'{owner}' using utf8mb4), convert(x'{operation}' using utf8mb4)
from (select (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) as now) clock where @free
on duplicate key update orphan_retention = `tower_idempotency`.orphan_retention;
update `tower_idempotency` set
  generation = if(expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), 1, if(coalesce(token = x'{token}', false), generation, generation + 1)),
  created = if(expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), created),
  checkpoint = if(expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), null, checkpoint),
  checkpoint_data = if(expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), null, checkpoint_data),
  token = x'{token}',
  fingerprint = if(expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), x'{fingerprint}', fingerprint),
  orphan_retention = {orphan_retention},
  lease_ends = (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) + {lease},
  expires = (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) + {lease} + {orphan_retention},
  completed = null,
  record = null,
  owner = convert(x'{owner}' using utf8mb4),
  operation = convert(x'{operation}' using utf8mb4)
where @free and id = x'{id}' and (expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) or completed is null and (coalesce(token = x'{token}', false) or true and lease_ends <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) and fingerprint = x'{fingerprint}'));
select completed is not null, coalesce(token = x'{token}', false), expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), fingerprint, generation,
  lease_ends - (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), record, expires - (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), token
from `tower_idempotency` where id = x'{id}'; commit and no chain no release;
