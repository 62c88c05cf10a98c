set @record = from_base64('{record}');set transaction isolation level read committed; start transaction;
update `tower_idempotency` set
  generation = if(coalesce(token = x'{token}', false), generation, {generation}),
  created = if(expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), created),
  owner = if(expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), '', owner),
  operation = if(expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), '', operation),
  checkpoint = if(expires > (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) and substring(@record, 2, 1) = 0x02, checkpoint, null),
  checkpoint_data = if(expires > (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) and substring(@record, 2, 1) = 0x02, checkpoint_data, null),
  token = x'{token}',
  fingerprint = x'{fingerprint}',
  expires = (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) + {retention},
  completed = (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000),
  record = @record
where id = x'{id}' and (expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) or completed is null and (token = x'{token}' or token is null));
insert into `tower_idempotency`
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, record, owner, operation)
select x'{id}', x'{token}', x'{fingerprint}', {generation}, now, 0, now + {retention}, now, now, @record, '', ''
from (select (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) as now) clock where not exists (select 1 from `tower_idempotency` where id = x'{id}')
on duplicate key update orphan_retention = `tower_idempotency`.orphan_retention;
select completed is not null, coalesce(token = x'{token}', false), expires <= (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), token is null
from `tower_idempotency` where id = x'{id}'; commit and no chain no release; set @record = null;
