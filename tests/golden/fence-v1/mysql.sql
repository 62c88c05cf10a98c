-- begin
set transaction isolation level read committed; start transaction read write; savepoint tower_idempotency;

-- lease status
select coalesce(id = ? and token = ? and completed is null and expires > (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000), false) from `tower_idempotency` where id = ?;

-- release mark
release savepoint tower_idempotency;

-- write record
update `tower_idempotency` set
  checkpoint = if(?, checkpoint, null),
  checkpoint_data = if(?, checkpoint_data, null),
  expires = (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000) + ?,
  record = ?,
  completed = (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000)
where id = ? and token = ? and completed is null and expires > (timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000);
