set transaction isolation level read committed; start transaction;
delete from `tower_idempotency` where id = x'{id}' and token = x'{token}' and completed is null and expires > (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) and generation = 1 and checkpoint is null;
update `tower_idempotency` set token = null, expires = (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) + orphan_retention, lease_ends = (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000)
where id = x'{id}' and token = x'{token}' and completed is null and expires > (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) and (generation > 1 or checkpoint is not null); commit and no chain no release;
